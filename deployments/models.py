"""Which target and which drafter a configuration means, checked against each other from their JSON files alone.

Imports no torch and reads no weights, so that a bad configuration stops within a second. Knows no Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ddtree.deployments import random_models
from ddtree.deployments.config import AUTO, AppConfig, DrafterConfig, TargetConfig
from ddtree.deployments.errors import ConfigError
from ddtree.deployments.shapes import shipped_checkpoints
from ddtree.drafter.config import DrafterInfo
from ddtree.drafter.recordings import acceptance_by_depth, read_recordings
from ddtree.verifier.backends import check_backend
from ddtree.verifier.model_dir import TargetInfo, resolve


@dataclass(frozen=True)
class Models:
    """What a deployment loads. Written here, read by every actor."""

    target: TargetInfo
    served_name: str
    max_context: int  # prompt + answer, tokens
    drafter: DrafterInfo | None
    drafter_dir: Path | None

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(self.drafter.target_layer_ids) if self.drafter else ()

    @property
    def horizon(self) -> int:
        """Deepest node of a tree."""
        return self.drafter.horizon if self.drafter else 0


def find(config: AppConfig, progress: Callable[[str, int, int], None] | None = None) -> Models:
    """Resolve and check everything that a deployment names. Raises ConfigError. Prepares an embedded target, and makes
    random models, on first use."""
    try:
        check_backend(config.verifier.backend)
        drafter_dir = _drafter_dir(config.drafter)
        drafter = DrafterInfo.read(drafter_dir) if drafter_dir else None
        target = TargetInfo.read(_target_dir(config.target, progress))
        check_backend(config.verifier.backend, target)
        if drafter:
            drafter.check_target(target.hidden_size, target.vocab_size, target.num_layers, target.name)
        if drafter and (synthetic := config.drafter.synthetic):
            acceptance_by_depth(drafter.horizon, synthetic.acceptance, synthetic.acceptance_length)
            read_recordings(synthetic.record)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    max_context = min(config.target.max_context or target.max_positions, target.max_positions)
    rows, page_size = max_context + config.tree.max_budget + 1, config.verifier.page_size
    need = (-(-rows // page_size) + 1) * page_size  # one page is scratch
    if config.verifier.kv_tokens != AUTO and config.verifier.kv_tokens < need:
        raise ConfigError(
            f"verifier.kv_tokens ({config.verifier.kv_tokens}) must hold one sequence of full length: at least {need} "
            f"(context {max_context} + tree.max_budget + 1, in pages, and one more); raise it or lower target.max_context"
        )
    return Models(target, config.target.served_name or target.name, max_context, drafter, drafter_dir)


def _target_dir(target: TargetConfig, progress: Callable[[str, int, int], None] | None) -> Path:
    return random_models.target(target.model) if target.weights == "random" else resolve(target.model, progress)


def _drafter_dir(drafter: DrafterConfig) -> Path | None:
    if drafter.checkpoint is None:
        return None
    if drafter.weights == "random":
        return random_models.drafter(drafter.checkpoint)
    return checkpoint_dir(drafter.checkpoint, "drafter.checkpoint")


def checkpoint_dir(name: str, option: str) -> Path:
    """The directory of a shipped drafter's name, or the given one. Raises ConfigError, naming the option, where there is none."""
    shipped = shipped_checkpoints()
    for path in (shipped / name, Path(name).expanduser()):
        if (path / "config.json").is_file():
            return path.resolve()
    names = sorted(p.parent.name for p in shipped.glob("*/config.json"))
    raise ConfigError(
        f"{option} '{name}' is neither a shipped checkpoint ({', '.join(names) or 'none'}) "
        "nor a directory with a config.json"
    )
