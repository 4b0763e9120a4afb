"""How many pages fit into a GPU: measured with the weights loaded and the largest step run once. Knows no model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ddtree.verifier.graphs import FixedBatch, StepSizes
from ddtree.verifier.model import Model
from ddtree.verifier.pool import Pool

log = logging.getLogger(__name__)
MIB = 1 << 20


@dataclass(frozen=True)
class MemoryShare:
    """What this rank may fill of its GPU."""

    fraction: float  # of the GPU's memory, for all processes of the deployment together
    others: int = 0  # bytes of it that are not this process's allocations: other processes, CUDA contexts, libraries
    others_per_token: int = 0  # bytes that other processes keep for each token of the pool


def fitting_pages(bind: Callable[[int], Pool], model: Model, largest: StepSizes | None, share: MemoryShare) -> int:
    """Pages of the largest pool that leaves room for every step.

    Args:
        bind: gives the model a pool of so many pages and returns it; called with one page, to run a step.
        largest: the largest step. Its memory counts twice: once as it runs, once as what its CUDA graphs keep.
            It also says how many pages the longest sequence has.
    Raises: ValueError where the longest sequence does not fit, or without a largest step.
    """
    if largest is None:
        raise ValueError("a pool as large as fits is sized by the largest step; none was given")
    pool = bind(1)
    device, page_size = pool.device, pool.page_size
    weights = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    _run(model, FixedBatch(largest, page_size, 0, device), largest.rows)
    step = torch.cuda.max_memory_allocated(device) - weights
    torch.cuda.empty_cache()
    allowed = int(share.fraction * torch.cuda.get_device_properties(device).total_memory)
    per_page = (pool.kv_bytes_per_token + share.others_per_token) * page_size
    pages = max(0, allowed - share.others - weights - 2 * step) // per_page
    found = (
        f"{allowed // MIB} MiB of {device} may be filled: weights take {weights // MIB}, steps {2 * step // MIB}, the rest of "
        f"the deployment {share.others // MIB}; {pages} pages of {page_size} tokens fit ({per_page} bytes each)"
    )
    if pages <= largest.pages:  # one page is spare
        raise ValueError(
            f"{found}, but the longest sequence needs {largest.pages} and one more: lower target.max_context, "
            "scheduler.max_sequences or scheduler.prefill_rows, or raise verifier.gpu_memory_fraction"
        )
    log.info("%s", found)
    return pages


@torch.inference_mode()
def _run(model: Model, batch: FixedBatch, rows: int) -> None:
    batch.clear(rows)
    hidden, _features = model.forward(*batch.first(rows))
    logits = model.logits(hidden)
    if logits is not None:
        logits.float().amax(-1)  # as the sampler does
    torch.cuda.synchronize(hidden.device)
