"""Best-first draft trees whose scores depend on the path: the checked entry point. Knows no model."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.kernels.checks import check, check_int32, check_reachable
from ddtree.kernels.dispatch import implementation
from ddtree.kernels.tree import DraftTree
from ddtree.kernels.tree_build import check_out


def tree_build_path(
    first: Tensor,
    conditional: Tensor,
    ids: Tensor,
    root: Tensor,
    seq_len: Tensor,
    budget: Tensor,
    *,
    max_budget: int,
    out: DraftTree | None = None,
) -> DraftTree:
    """`tree_build` for a drafter that knows how likely a candidate is after each candidate of the depth before.

    Nodes come in the same order (score descending, depth ascending, parent node ascending, rank ascending), where
    score(child) = fp32(score(parent) + its log-prob given the parent) and rank is its place among its siblings, which are
    ordered by (log-prob descending, candidate ascending). Where rows do not depend on the parent and are sorted, the result
    is `tree_build`'s, bit for bit.

    Args:
        first: [B, K] float32 ≤ 0 of the candidates of depth 1, in any order. A value that is not finite is no candidate,
            here and below.
        conditional: [B, L-1, K, K] float32 ≤ 0: [b, d-1, i, j] is of candidate j of depth d + 1 where its parent is candidate
            i of depth d; in any order.
        ids: [B, L, K] int32 token ids of the candidates; different within a row.
        root, seq_len, budget, max_budget, out: as in `tree_build`; so is what may lie in pinned host memory.

    Returns:
        DraftTree of B trees with N + 1 slots each, `out` where given; siblings in rank order.

    Raises:
        ValueError: wrong shape, dtype or device; on CPU also a budget out of range, or a positive log-prob.

    Example:
        >>> first = torch.log(torch.tensor([[0.7, 0.2]]))
        >>> conditional = torch.log(torch.tensor([[[[0.1, 0.8], [0.6, 0.3]]]]))  # after candidate 0: 8; after 1: 7
        >>> one = torch.ones(1, dtype=torch.int32)
        >>> ids = torch.tensor([[[5, 6], [7, 8]]], dtype=torch.int32)
        >>> tree_build_path(first, conditional, ids, one * 4, one * 10, one * 4, max_budget=4).tokens
        tensor([[4, 5, 8, 6, 7]], dtype=torch.int32)
    """
    device, (batch, levels, k) = first.device, _shape(ids)
    check("first", first, (batch, k), (torch.float32,), device)
    check("conditional", conditional, (batch, max(levels - 1, 0), k, k), (torch.float32,), device)
    check_int32("ids", ids, (batch, levels, k), device)
    for name, value in (("root", root), ("seq_len", seq_len), ("budget", budget)):
        check_reachable(name, value, (batch,), device)
    if max_budget < 0:
        raise ValueError(f"max_budget is {max_budget}; pass 0 or more.")
    if out is not None:
        check_out(out, (batch, levels, k), max_budget, device)
    numbers = (root, seq_len, budget)
    tree: DraftTree = implementation(device).tree_build_path(
        first, conditional, ids, *numbers, max_budget=max_budget, out=out
    )
    return tree


def _shape(ids: Tensor) -> tuple[int, int, int]:
    check_int32("ids", ids, (None, None, None), None)
    return ids.shape[0], ids.shape[1], ids.shape[2]
