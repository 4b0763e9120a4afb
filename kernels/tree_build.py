"""Best-first draft trees from per-depth candidates: the checked entry point. Knows no model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ddtree.kernels.checks import check, check_int32, check_reachable
from ddtree.kernels.dispatch import implementation
from ddtree.kernels.tree import DraftTree


def tree_build(
    logprobs: Tensor,
    ids: Tensor,
    root: Tensor,
    seq_len: Tensor,
    budget: Tensor,
    *,
    max_budget: int,
    out: DraftTree | None = None,
) -> DraftTree:
    """Builds, for each sequence, the tree of the `budget` most probable prefixes (DDTree, best-first).

    Nodes come in the order (score descending, depth ascending, parent node ascending, rank ascending), where
    score(child) = fp32(score(parent) + logprobs[depth - 1, rank]) and score(root) = 0.

    Args:
        logprobs: [B, L, K] float32 ≤ 0, each row descending as `topk_logprobs` gives it. A value that is not finite
            is no candidate.
        ids: [B, L, K] int32 token ids of the candidates; different within a row.
        root: [B] int32 token of node 0, the bonus token.
        seq_len: [B] int32 absolute position of node 0.
        budget: [B] int32 most nodes wanted besides the root, 0 … max_budget.
        max_budget: N, which sizes the output.
        out: where to build, from `DraftTree.allocate` of this size; None allocates.

    With candidates on a GPU, `root`, `seq_len` and `budget` may lie in pinned host memory; they are read in place, so they
    must stay as they are until the stream is done.

    Returns:
        DraftTree of B trees with N + 1 slots each, `out` where given; a tree is smaller where fewer prefixes have a finite
        score.

    Raises:
        ValueError: wrong shape, dtype or device; on CPU also a budget out of range, or candidates that are positive
            or not descending.

    Example:
        >>> logprobs = torch.log(torch.tensor([[[0.7, 0.2], [0.6, 0.3]]]))
        >>> one = torch.ones(1, dtype=torch.int32)
        >>> ids = torch.tensor([[[5, 6], [7, 8]]], dtype=torch.int32)
        >>> tree_build(logprobs, ids, one * 4, one * 10, one * 3, max_budget=3).tokens
        tensor([[4, 5, 7, 8]], dtype=torch.int32)
    """
    device = logprobs.device
    check("logprobs", logprobs, (None, None, None), (torch.float32,), device)
    batch = logprobs.shape[0]
    check_int32("ids", ids, tuple(logprobs.shape), device)
    check_reachable("root", root, (batch,), device)
    check_reachable("seq_len", seq_len, (batch,), device)
    check_reachable("budget", budget, (batch,), device)
    if max_budget < 0:
        raise ValueError(f"max_budget is {max_budget}; pass 0 or more.")
    if out is not None:
        check_out(out, logprobs.shape, max_budget, device)
    return implementation(device).tree_build(logprobs, ids, root, seq_len, budget, max_budget=max_budget, out=out)


def tree_builder(
    shape: tuple[int, int, int], root: Tensor, seq_len: Tensor, budget: Tensor, *, max_budget: int, out: DraftTree
) -> Callable[[Tensor, Tensor], DraftTree]:
    """`tree_build` of log-probs and ids [B, L, K] = `shape` that are still to come, on `out`'s device, and are not checked.

    All else of the call is checked and made ready here: between two rounds of a server code grows cold, and what it takes
    counts several times over. What is returned enqueues on the stream that is current now. Else as in `tree_build`.
    """
    device = out.tokens.device
    for name, value in (("root", root), ("seq_len", seq_len), ("budget", budget)):
        check_reachable(name, value, (shape[0],), device)
    check_out(out, shape, max_budget, device)
    builder: Callable[[Tensor, Tensor], DraftTree] = implementation(device).tree_builder(
        shape, root, seq_len, budget, max_budget=max_budget, out=out
    )
    return builder


def check_out(out: DraftTree, shape: tuple[int, ...], max_budget: int, device: torch.device) -> None:
    """Raises ValueError unless `out` is for candidates of this shape [B, L, K]."""
    check_int32("out.tokens", out.tokens, (shape[0], max_budget + 1), device)
    if out.max_depth != min(shape[1], max_budget):
        raise ValueError(f"out has max_depth {out.max_depth}; allocate it for {shape[1]} levels.")
