"""Target and drafter as a configuration has them, loaded in this process. Knows no actor and no Ray."""

from __future__ import annotations

import torch

from ddtree.deployments.config import AppConfig
from ddtree.deployments.device_sizes import context_tokens, pool_pages, step_sizes
from ddtree.deployments.models import Models
from ddtree.drafter.drafter import Drafter
from ddtree.drafter.recordings import acceptance_by_depth, read_recordings
from ddtree.drafter.synthetic import SyntheticDrafter
from ddtree.verifier import backends
from ddtree.verifier.dtype import choose_dtype
from ddtree.verifier.target import Target


def load_drafter(config: AppConfig, models: Models) -> Drafter | SyntheticDrafter:
    """The drafter of a configuration that has one."""
    device, dtype = config.drafter.device, config.drafter.dtype
    memory = torch.cuda.get_device_properties(device).total_memory if device == "cuda" else 0
    assert models.drafter_dir is not None, "a drafter is only loaded where there is a checkpoint"
    synthetic = config.drafter.synthetic
    drafter = Drafter(
        models.drafter_dir,
        models.target.model_dir,
        device=device,
        dtype=choose_dtype(device) if dtype == "auto" else getattr(torch, dtype),
        top_k=config.tree.top_k,
        threads=config.drafter.threads,
        context_tokens=context_tokens(config, models, memory),
        max_sequences=config.scheduler.max_sequences,
        path_head=config.drafter.path_head and synthetic is None,  # what overwrites candidates knows no paths
    )
    if synthetic is None:
        return drafter
    acceptance = acceptance_by_depth(drafter.info.horizon, synthetic.acceptance, synthetic.acceptance_length)
    return SyntheticDrafter(drafter, read_recordings(synthetic.record), acceptance)


def load_target(config: AppConfig, models: Models, ranks: backends.Ranks | None = None) -> Target:
    """The target, or this rank's part of it."""
    return backends.load_target(
        config.verifier.backend,
        str(models.target.model_dir),
        ranks=ranks,
        dtype=config.target.dtype,
        device=config.verifier.device,
        page_size=config.verifier.page_size,
        pages=pool_pages(config, models),
        feature_layers=models.feature_layers,
        threads=config.verifier.threads,
        graphs=step_sizes(config, models),
        batch_invariant=config.verifier.batch_invariant,
    )
