"""Definition of `kv_compact`: gather, then scatter. It also serves on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def kv_compact(
    caches: Sequence[Tensor], page_table: Tensor, page_size: int, seq_len: Tensor, path: Tensor, n_accepted: Tensor
) -> None:
    i = torch.arange(path.shape[1], device=path.device)
    moves = (i < n_accepted[:, None]) & (path != i)
    sequence, step = moves.nonzero(as_tuple=True)
    if not len(sequence):
        return

    def slots(offset: Tensor) -> Tensor:
        row = seq_len[sequence] + offset
        return page_table[sequence, row // page_size].long() * page_size + row % page_size

    source, target = slots(path[sequence, step]), slots(step)
    for cache in caches:
        rows = cache.flatten(1, 2)  # a view: the entry point checked the strides
        rows.index_copy_(1, target, rows.index_select(1, source))
