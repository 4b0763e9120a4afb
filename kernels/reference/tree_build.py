"""Definition of `tree_build`: a best-first heap on the CPU. It also serves there (about 40 µs for a tree of 32 nodes). What a
node's children are, `grow` is told: `tree_build_path` differs in that alone.

A heap entry stands for a node and all its later siblings: siblings are ranked, so the next one is pushed when this one
is popped, together with this one's first child. Both come later in the order, so pops are in the order.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush

import numpy as np
import torch
from torch import Tensor

from ddtree.kernels.tree import DraftTree, ancestor_words, into

_FIELDS = ("tokens", "parent", "depth", "position", "first_child", "next_sibling")
_PADDING = np.array([0, -1, 0, 0, -1, -1], np.int32)[:, None, None]

# A node's children, best first: their log-probs, their tokens and, by rank, the children of each.
Row = tuple[Sequence[float], Sequence[int], "Sequence[Row] | Mapping[int, Row]"]
CHILDLESS: Row = ((), (), ())


def tree_builder(
    shape: tuple[int, int, int], root: Tensor, seq_len: Tensor, budget: Tensor, *, max_budget: int, out: DraftTree
) -> Callable[[Tensor, Tensor], DraftTree]:
    return lambda logprobs, ids: tree_build(logprobs, ids, root, seq_len, budget, max_budget=max_budget, out=out)


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
    budgets = budgets_of(budget, max_budget)
    values, tokens, counts = _candidates(logprobs.cpu().numpy(), ids.cpu().numpy(), max(budgets, default=0))
    rows = map(_same_for_every_parent, values, tokens, counts)
    return grow(rows, root, seq_len, budgets, logprobs.shape[1], max_budget, logprobs.device, out)


def _same_for_every_parent(values: list[list[float]], tokens: list[list[int]], counts: list[int]) -> Row:
    row = CHILDLESS
    for n, logprobs, ids in zip(counts[::-1], values[::-1], tokens[::-1], strict=True):
        row = logprobs if n == len(logprobs) else logprobs[:n], ids, [row] * n
    return row


def budgets_of(budget: Tensor, max_budget: int) -> list[int]:
    """The numbers. Raises ValueError where one is out of range."""
    budgets: list[int] = budget.tolist()
    if budgets and not 0 <= min(budgets) <= max(budgets) <= max_budget:
        raise ValueError(f"budget must be 0 … max_budget = {max_budget}; got {budgets}.")
    return budgets


def grow(
    first: Iterable[Row],
    root: Tensor,
    seq_len: Tensor,
    budgets: list[int],
    levels: int,
    max_budget: int,
    device: torch.device,
    out: DraftTree | None,
) -> DraftTree:
    """The tree of each sequence as `tree_build` returns them. `first`: the children of each root."""
    batch, size = len(budgets), max_budget + 1
    words = ancestor_words(size)
    fields = np.empty((len(_FIELDS), batch, size), np.int32)
    fields[:] = _PADDING
    score = np.zeros((batch, size), np.float32)
    ancestors = bytearray()
    n_nodes = []
    for b, (row, root_token, position) in enumerate(zip(first, root.tolist(), seq_len.tolist(), strict=True)):
        nodes, scores, bits = _grow(row, root_token, position, budgets[b])
        fields[:, b, : len(bits)] = nodes
        score[b, : len(bits)] = scores
        ancestors += b"".join([mask.to_bytes(4 * words, "little") for mask in bits])
        ancestors += bytes(4 * words * (size - len(bits)))
        n_nodes.append(len(bits))

    masks = np.frombuffer(ancestors, "<i4").reshape(batch, size, words)
    tree = DraftTree(
        **dict(zip(_FIELDS, torch.from_numpy(fields).to(device), strict=True)),
        ancestors=torch.from_numpy(masks).to(device),
        n_nodes=torch.tensor(n_nodes, dtype=torch.int32, device=device),
        score=torch.from_numpy(score).to(device),
        max_depth=min(levels, max_budget),
    )
    return into(out, tree)


def _candidates(
    values: np.ndarray, tokens: np.ndarray, budget: int
) -> tuple[list[list[list[float]]], list[list[list[int]]], list[list[int]]]:
    """Packs each row's finite values to its front, in order, and keeps as many as a tree of that budget can use.

    Returns values, token ids and the number of candidates, by sequence and depth.
    """
    finite = np.isfinite(values)
    if not finite.all():
        order = np.argsort(~finite, axis=-1, kind="stable")
        values = np.take_along_axis(np.where(finite, values, -np.inf), order, -1)
        tokens = np.take_along_axis(tokens, order, -1)
    values, tokens = values[:, :, :budget], tokens[:, :, :budget]
    if not ((values[..., 1:] <= values[..., :-1]).all() and (values[..., :1] <= 0).all()):
        raise ValueError("logprobs must be ≤ 0 and descending in each row; pass them as topk_logprobs returns them.")
    return values.tolist(), tokens.tolist(), np.minimum(finite.sum(-1), budget).tolist()


def _grow(first: Row, root: int, seq_len: int, budget: int) -> tuple[list[list[int]], list[float], list[int]]:
    """Grows one tree. Returns its fields (in the order of _FIELDS), each node's score, and its ancestor bits as one integer."""
    tokens, parents, depths, positions = [root], [-1], [0], [seq_len]
    first_child, next_sibling, last_child = [-1], [-1], [-1]
    scores, bits = [0.0], [1]
    heap: list[tuple[float, int, int, int, Row]] = []  # -score, depth, parent, rank (two never have the same), its row
    float32 = array("f", [0.0])  # storing a float64 sum of two float32 here rounds it to their float32 sum

    if first[0]:
        heap.append((-(0.0 + first[0][0]), 1, 0, 0, first))
    while heap and len(tokens) <= budget:
        cost, depth, parent, rank, row = heappop(heap)
        node = len(tokens)
        tokens.append(row[1][rank])
        parents.append(parent)
        depths.append(depth)
        positions.append(seq_len + depth)
        scores.append(-cost)
        bits.append(bits[parent] | 1 << node)
        first_child.append(-1)
        next_sibling.append(-1)
        last_child.append(-1)
        if rank == 0:
            first_child[parent] = node
        else:
            next_sibling[last_child[parent]] = node
        last_child[parent] = node
        values, _, below = row
        if rank + 1 < len(values):
            float32[0] = scores[parent] + values[rank + 1]
            heappush(heap, (-float32[0], depth, parent, rank + 1, row))
        if (row := below[rank])[0]:
            float32[0] = row[0][0] - cost
            heappush(heap, (-float32[0], depth + 1, node, 0, row))
    return [tokens, parents, depths, positions, first_child, next_sibling], scores, bits
