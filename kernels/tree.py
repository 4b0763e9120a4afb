"""Draft trees and accepted paths as padded tensor batches. Knows their layout, not how they are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

WORD_BITS = 32

Allocate = Callable[[tuple[int, ...]], Tensor]  # an int32 tensor of this shape, whatever it holds
Made = TypeVar("Made")


def ancestor_words(nodes: int) -> int:
    """Number of 32-bit words that hold one bit for each of `nodes` nodes."""
    return (nodes + WORD_BITS - 1) // WORD_BITS


@dataclass(frozen=True, eq=False)
class DraftTree:
    """B draft trees; N = the largest budget, W = ceil((N + 1) / 32). Written by `tree_build`.

    Node 0 is the root (the bonus token). Parents come before their children; siblings come in rank order.
    """

    tokens: Tensor  # [B, N+1] int32 token ids; 0 in padding, where 0 is no token
    parent: Tensor  # [B, N+1] int32 node index; -1 for the root and in padding
    depth: Tensor  # [B, N+1] int32 edges from the root; 0 in padding
    position: Tensor  # [B, N+1] int32 absolute position, seq_len + depth; 0 in padding
    first_child: Tensor  # [B, N+1] int32 node index; -1: none
    next_sibling: Tensor  # [B, N+1] int32 node index; -1: none
    ancestors: Tensor  # [B, N+1, W] int32 holding uint32 bits, LSB first, self included; 0 in padding
    n_nodes: Tensor  # [B] int32 number of nodes, root included
    score: Tensor  # [B, N+1] float32 sum of the path's log-probs; 0 at the root and in padding
    max_depth: int  # D: no node can be deeper, whatever the data; sizes AcceptedPath.path

    @classmethod
    def allocate(cls, batch: int, levels: int, max_budget: int, empty: Allocate) -> DraftTree:
        """Memory for what `tree_build` makes of candidates [batch, levels, K]."""
        size = max_budget + 1
        tokens, parent, depth, position, first_child, next_sibling = (empty((batch, size)) for _ in range(6))
        ancestors, n_nodes = empty((batch, size, ancestor_words(size))), empty((batch,))
        score, deepest = empty((batch, size)).view(torch.float32), min(levels, max_budget)
        return cls(tokens, parent, depth, position, first_child, next_sibling, ancestors, n_nodes, score, deepest)


@dataclass(frozen=True, eq=False)
class AcceptedPath:
    """One path from the root for each of B trees. Written by `tree_accept`."""

    path: Tensor  # [B, D+1] int32 node indices, starts with 0; -1 past its end
    n_accepted: Tensor  # [B] int32 length of the path, root included: accepted draft tokens + 1 bonus token
    bonus: Tensor  # [B] int32 the target's token at the last node of the path

    @classmethod
    def allocate(cls, batch: int, max_depth: int, empty: Allocate) -> AcceptedPath:
        """Memory for what `tree_accept` makes of B trees."""
        return cls(empty((batch, max_depth + 1)), empty((batch,)), empty((batch,)))


def into(out: Made | None, made: Made) -> Made:
    """`made` in the memory of `out`, where there is one."""
    if out is None:
        return made
    for name, value in vars(made).items():
        if isinstance(value, Tensor):
            getattr(out, name).copy_(value)
    return out
