"""Moves the KV rows of an accepted path to the end of the committed prefix: the checked entry point."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddtree.kernels.checks import check_int32, check_slots
from ddtree.kernels.dispatch import implementation


def kv_compact(
    caches: Sequence[Tensor], page_table: Tensor, page_size: int, seq_len: Tensor, path: Tensor, n_accepted: Tensor
) -> None:
    """Copies, in place and in every layer, the row at slot seq_len + path[i] to slot seq_len + i, i < n_accepted.

    Path indices increase, so a row never moves to a later slot; all rows are read before any is written. A path
    0, 1, 2, … costs nothing.

    Args:
        caches: tensors [layers, pages, page_size, …] that share the page table, contiguous over pages and slots.
        page_table: [S, P] int32; entries past a sequence's end are garbage and never used.
        page_size: slots in a page.
        seq_len: [S] int32 committed rows before the step that wrote the tree.
        path: [S, D+1] int32 increasing node indices that start with 0; not read past n_accepted.
        n_accepted: [S] int32 length of the path.

    Raises:
        ValueError: wrong shape, dtype, device or memory layout.
    """
    device = page_table.device
    check_int32("page_table", page_table, (None, None), device)
    sequences = page_table.shape[0]
    check_int32("seq_len", seq_len, (sequences,), device)
    check_int32("path", path, (sequences, None), device)
    check_int32("n_accepted", n_accepted, (sequences,), device)
    for i, cache in enumerate(caches):
        if cache.dim() < 3 or cache.shape[2] != page_size:
            raise ValueError(f"caches[{i}] has shape {list(cache.shape)}; pass [layers, pages, {page_size}, …].")
        if cache.device != device:
            raise ValueError(f"caches[{i}] is on {cache.device}; move it to {device}, where the page table is.")
        check_slots(f"caches[{i}]", cache, 1, page_size)
    implementation(device).kv_compact(caches, page_table, page_size, seq_len, path, n_accepted)
