"""Definition of `tree_build_path`: the heap of `tree_build` over rows that depend on the parent, sorted when they are needed."""

from __future__ import annotations

from math import isfinite

import numpy as np
import torch
from torch import Tensor

from ddtree.kernels.reference.tree_build import CHILDLESS, Row, budgets_of, grow
from ddtree.kernels.tree import DraftTree


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
    budgets = budgets_of(budget, max_budget)
    if any(bool((torch.isfinite(x) & (x > 0)).any()) for x in (first, conditional)):
        raise ValueError("log-probs must be ≤ 0.")
    device = first.device
    sequences = zip(*(x.cpu().numpy() for x in (first, conditional, ids)), strict=True)
    rows = (_Rows(*sequence).first for sequence in sequences)
    return grow(rows, root, seq_len, budgets, ids.shape[1], max_budget, device, out)


class _Rows:
    """The rows of one sequence."""

    def __init__(self, first: np.ndarray, conditional: np.ndarray, ids: np.ndarray) -> None:
        """first [K], conditional [L-1, K, K], ids [L, K]."""
        self._conditional, self._tokens = conditional, ids.tolist()
        self._known: dict[tuple[int, int], Row] = {}
        self.first = self._ranked(first, 1) if len(ids) else CHILDLESS

    def below(self, depth: int, candidate: int) -> Row:
        """The children of that candidate of that depth."""
        if depth == len(self._tokens):
            return CHILDLESS
        row = self._known.get((depth, candidate))
        if row is None:
            row = self._known[depth, candidate] = self._ranked(self._conditional[depth - 1, candidate], depth + 1)
        return row

    def _ranked(self, logprobs: np.ndarray, depth: int) -> Row:
        """Candidates of that depth with a finite log-prob, by (log-prob descending, candidate ascending)."""
        values: list[float] = logprobs.tolist()
        order = sorted((i for i, value in enumerate(values) if isfinite(value)), key=values.__getitem__, reverse=True)
        tokens = self._tokens[depth - 1]
        return [values[i] for i in order], [tokens[i] for i in order], _Below(self, depth, order)


class _Below(dict[int, Row]):
    """By rank, the children of some siblings."""

    def __init__(self, rows: _Rows, depth: int, order: list[int]) -> None:
        super().__init__()
        self._rows, self._depth, self._order = rows, depth, order

    def __missing__(self, rank: int) -> Row:
        row = self[rank] = self._rows.below(self._depth, self._order[rank])
        return row
