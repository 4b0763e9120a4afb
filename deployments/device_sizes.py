"""How much of its device each actor may take: the largest step, the KV pool, the drafter's contexts.

On a GPU the verifier measures what its weights and steps leave; what the other processes there take is known on paper
(sizing.py). Knows no actor.
"""

from __future__ import annotations

from ddtree.deployments.bounds import sequence_pages
from ddtree.deployments.config import AUTO, AppConfig
from ddtree.deployments.models import Models
from ddtree.deployments.shapes import facts
from ddtree.deployments.sizing import Memory, size, step_rows
from ddtree.deployments.target_shape import TargetShape
from ddtree.kernels.tree import ancestor_words
from ddtree.verifier.graphs import StepSizes
from ddtree.verifier.memory import MemoryShare


def step_sizes(config: AppConfig, models: Models) -> StepSizes | None:
    """The steps to record as CUDA graphs: all that the scheduler plans. None on a CPU."""
    if config.verifier.device == "cpu":
        return None
    return StepSizes(
        sequences=config.scheduler.max_sequences,
        rows=step_rows(config)[0],
        pages=sequence_pages(config, models),
        words=ancestor_words(config.tree.max_budget + 1),
        path=models.horizon + 1,
    )


def pool_pages(config: AppConfig, models: Models) -> int | MemoryShare:
    """Pages of a rank's pool, or what it may fill with them."""
    if config.verifier.kv_tokens != AUTO:
        return config.verifier.kv_tokens // config.verifier.page_size
    memory = _on_paper(config, models)
    load = memory.loads[0]  # a verifier's GPU that a drafter shares, where there is one: every rank has as many pages
    own = ("target weights", "target activations")
    others = sum(amount for name, amount in load.fixed.items() if name not in own)
    return MemoryShare(config.verifier.gpu_memory_fraction, others, load.per_token - memory.kv_bytes_per_token)


def context_tokens(config: AppConfig, models: Models, gpu_memory: int) -> int:
    """Tokens whose context a drafter keeps: as many as the verifier's pool holds. `gpu_memory`: bytes of the GPU."""
    page = config.verifier.page_size
    if config.verifier.kv_tokens != AUTO:
        return config.verifier.kv_tokens
    return _on_paper(config, models).kv_tokens(int(config.verifier.gpu_memory_fraction * gpu_memory), page)


def _on_paper(config: AppConfig, models: Models) -> Memory:
    content, source = facts(str(models.target.model_dir), "target", "")
    return size(config, TargetShape.from_config(content, source), models.drafter)
