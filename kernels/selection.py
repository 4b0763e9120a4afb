"""What is learned of draft nodes' acceptance, what nodes cost, and which were kept, as tensors. Knows their layout, not how they
are made.

A drafter says how probable a token is at its depth whatever came before it. That is too much to expect after a token that was
not its first choice, and how far its word is to be trusted changes with depth and with what is written. So what it says is
corrected by how often nodes like this one were accepted when their parents were. A cell of the table with few cases stays near
that of all depths, and that one near the drafter's word.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PRIOR = 8.0  # cases that what is known otherwise counts as
MEMORY = 4000.0  # cases of a cell; then all of them count half
UNIT = 2.0**-24  # tokens that gains, prices and costs are whole multiples of, so that their sums are exact


@dataclass(frozen=True, eq=False)
class AcceptanceTable:
    """How often nodes were accepted whose parents were, by kind of sequence, depth, whether all before them were first choices,
    and the drafter's own log-probability. Written by `tree_learn`."""

    cases: Tensor  # [kinds, 1 + D, 2, E + 1] float32; depth 0 stands for all depths, D for it and the deeper ones
    hits: Tensor  # the same shape: those accepted
    edges: Tensor  # [E] float32 log-probabilities, ascending: cell e has those above e of them

    @classmethod
    def empty(cls, kinds: int, depths: int, edges: Tensor) -> AcceptanceTable:
        """Knows nothing and believes the drafter. Lies where `edges` does."""
        shape = (kinds, 1 + depths, 2, len(edges) + 1)
        return cls(torch.zeros(shape, device=edges.device), torch.zeros(shape, device=edges.device), edges)


@dataclass(frozen=True, eq=False)
class Prices:
    """What decides how many nodes are worth it. In tokens, so seconds times the tokens per second that a second is worth."""

    kind: Tensor  # [B] int32 of each tree, for the table
    luck: Tensor  # [B] float32: times what the table says its nodes' chances are
    most: Tensor  # [B] int32 nodes that the tree may keep
    price: Tensor  # [B] float64 of a node of this tree beside what all nodes cost; negative: the tree keeps as many as it may
    at: Tensor  # [M] int32 numbers of nodes, ascending from 0 …
    cost: Tensor  # [M] float64 … and what so many nodes cost; straight between two, and beyond the last two


@dataclass(frozen=True, eq=False)
class Selection:
    """What `tree_select` found; N = the largest budget. Nodes in the trees' order, without the root."""

    gains: Tensor  # [B, N] float32 probability of being accepted by the table, luck apart; 0 in padding
    cells: Tensor  # [B, N] int32 flat index into the table; -1 in padding
    nodes: Tensor  # [B] int32 kept besides the root
    expected: Tensor  # [B] float32 of them accepted, with luck
