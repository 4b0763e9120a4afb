"""A tree as engines with host-side trees make it today: candidates to the host, a heap in Python, a mask, all of it back.

Does the work of the published DDTree code, step for step in a form of our own: rank tuples break ties, each node has a map of
its children (with which the accepted path is later followed on the host), copies block. A batch is copied at once, in its favour.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import torch
from torch import Tensor

from .data import Candidates


@dataclass(frozen=True)
class HostTrees:
    """What the target's forward takes, on the device, and what the host keeps to follow the accepted path."""

    tokens: Tensor  # [B, N+1]
    positions: Tensor  # [B, N+1]
    mask: Tensor  # [B, N+1, N+1] bfloat16, added to the scores
    children: list[list[dict[int, int]]]  # of each sequence and node: token → node


def build(candidates: Candidates, budget: int) -> HostTrees:
    logprobs, ids = candidates.logprobs.cpu().numpy(), candidates.ids.long().cpu().numpy()
    grown = [_grow(*sequence, budget) for sequence in zip(logprobs, ids, strict=True)]
    all_tokens, all_depths, all_visible, children = zip(*grown, strict=True)
    tokens, depths, visible = (torch.from_numpy(np.stack(x)).cuda() for x in (all_tokens, all_depths, all_visible))
    mask = torch.zeros(visible.shape, dtype=torch.bfloat16, device="cuda")
    mask.masked_fill_(~visible, torch.finfo(torch.bfloat16).min)
    tokens[:, 0] = candidates.root
    return HostTrees(tokens, depths + candidates.seq_len[:, None], mask, list(children))


def _grow(
    logprobs: np.ndarray, ids: np.ndarray, budget: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[int, int]]]:
    """Tokens and depths [N+1], visible [N+1, N+1], children; the root's token is left 0."""
    levels, width = logprobs.shape
    tokens, depths = np.zeros(budget + 1, np.int64), np.zeros(budget + 1, np.int64)
    parents = np.full(budget + 1, -1, np.int32)
    children: list[dict[int, int]] = [{}]
    best = float(logprobs[0, 0])
    heap: list[tuple[float, tuple[int, ...], int, float]] = [(-best, (0,), 0, best)]  # cost, ranks, parent, score
    while heap and len(children) <= budget:
        _, ranks, parent, score = heappop(heap)
        node, depth, rank = len(children), len(ranks), ranks[-1]
        tokens[node] = token = int(ids[depth - 1, rank])
        depths[node], parents[node] = depth, parent
        children.append({})
        children[parent][token] = node
        if rank + 1 < width:
            sibling = score - float(logprobs[depth - 1, rank]) + float(logprobs[depth - 1, rank + 1])
            heappush(heap, (-sibling, (*ranks[:-1], rank + 1), parent, sibling))
        if depth < levels:
            child = score + float(logprobs[depth, 0])
            heappush(heap, (-child, (*ranks, 0), node, child))
    visible = np.eye(budget + 1, dtype=np.bool_)
    for node in range(1, len(children)):
        visible[node, :node] = visible[parents[node], :node]
    return tokens, depths, visible, children
