"""What a node of a draft tree is worth: the probability that it is accepted, learned from what was. Knows trees, no policy.

A drafter says how probable a token is at its depth whatever came before it. That is too much to expect after a token that was
not its first choice, and how far its word is to be trusted changes with depth and with what is written. So what it says is
corrected by how often nodes like this one were accepted when their parents were: a table by kind of draw, depth, whether all
before were first choices, and the drafter's own probability. A cell with few cases stays near that of all depths, and that one
near the drafter's word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddtree.deployments.costs import Numbers
from ddtree.kernels import DraftTree

BINS = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96])  # where the drafter's probability is cut
DEPTHS = 8  # told apart; deeper ones count as the last
COLUMNS = 2 * (len(BINS) + 1)  # of a table: after first choices or not, by bin; its rows are depths, 0 for all of them
PRIOR = 8.0  # cases that what is known otherwise counts as
MEMORY = 4000  # cases of a cell; then all of them count half


@dataclass(frozen=True)
class Worth:
    """Of the nodes of B trees but their roots, in the trees' order. Written by `Gains`."""

    gains: Numbers  # [B, N] probability of being accepted; 0 in padding
    parents: NDArray[np.int64]  # [B, N]
    depths: NDArray[np.int64]  # [B, N]
    cells: NDArray[np.int64]  # [B, N] of the table


class Gains:
    """Knows nothing at first and believes the drafter."""

    def __init__(self) -> None:
        self._cases, self._hits = np.zeros((2, 2 * (1 + DEPTHS) * COLUMNS))

    def worth(self, tree: DraftTree, logprobs: Tensor, ids: Tensor, sampled: list[bool]) -> Worth:
        """Of trees built from the candidates [B, L, K]; `sampled`: whether a temperature is at work, by tree."""
        tokens, parents, depths = torch.stack((tree.tokens, tree.parent, tree.depth)).cpu().numpy().astype(np.int64)
        batch = np.arange(len(tokens))[:, None]
        levels, there = np.maximum(depths - 1, 0), parents >= 0
        above = np.maximum(parents, 0)
        said, first = _said(logprobs, ids, tokens, batch, levels)
        said = np.where(there, said, 0.0)
        straight = np.ones(tokens.shape, bool)  # all before it were first choices
        cells = np.zeros(tokens.shape, np.int64)
        gains = np.where(there, 0.0, 1.0)
        tables = np.array(sampled, np.int64)[:, None] * (1 + DEPTHS)
        bins = np.searchsorted(BINS, said)
        for depth in range(1, int(depths.max(initial=0)) + 1):
            at = there & (depths == depth)
            row, parent = np.nonzero(at)[0], above[at]
            before = straight[row, parent]
            straight[at] = before & first[at]
            overall = tables[row, 0] * COLUMNS + before * (len(BINS) + 1) + bins[at]
            cells[at] = overall + min(depth, DEPTHS) * COLUMNS
            gains[at] = gains[row, parent] * self._chance(cells[at], self._chance(overall, said[at]))
        return Worth(np.where(there, gains, 0.0)[:, 1:], above[:, 1:], depths[:, 1:], cells[:, 1:])

    def note(self, worth: Worth, budgets: list[int], paths: list[list[int]]) -> None:
        """Of these trees so many nodes were verified, and these paths accepted."""
        accepted = np.zeros((len(paths), worth.gains.shape[1] + 1), bool)
        for row, path in zip(accepted, paths, strict=True):
            row[path] = True
        reached = np.take_along_axis(accepted, worth.parents, 1) & (worth.gains > 0)
        reached &= np.arange(1, accepted.shape[1]) <= np.array(budgets)[:, None]
        cells = worth.cells[reached]
        overall = cells - np.minimum(worth.depths[reached], DEPTHS) * COLUMNS
        for which in (cells, overall):
            np.add.at(self._cases, which, 1.0)
            np.add.at(self._hits, which, accepted[:, 1:][reached])
        fade = np.where(self._cases > MEMORY, 0.5, 1.0)
        self._cases *= fade
        self._hits *= fade

    def _chance(self, cells: NDArray[np.int64], known: Numbers) -> Numbers:
        """That a node of a cell is accepted when its parent is; `known` without the cell's own cases."""
        found: Numbers = (self._hits[cells] + PRIOR * known) / (self._cases[cells] + PRIOR)
        return found


def _said(logprobs: Tensor, ids: Tensor, tokens: Any, batch: Any, levels: Any) -> tuple[Numbers, NDArray[np.bool_]]:
    """The drafter's probability of each node's token [B, N+1], and whether it is its first choice."""
    offered = ids.cpu().numpy()[batch, levels]  # [B, N+1, K]
    rank = (offered == tokens[..., None]).argmax(-1)
    found: Numbers = np.exp(logprobs.cpu().numpy()[batch, levels, rank].astype(np.float64))
    return found, rank == 0
