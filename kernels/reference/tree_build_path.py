"""Definition of `tree_build_path`: the heap of `tree_build` over rows that depend on the parent, sorted when they are needed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
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
    if any(bool(x[x > 0].isfinite().any()) for x in (first, conditional)):
        raise ValueError("log-probs must be ≤ 0.")
    rows = _first_rows(*(x.cpu().numpy() for x in (first, conditional, ids)))
    return grow(rows, root, seq_len, budgets, ids.shape[1], max_budget, first.device, out)


def _first_rows(*sequences: np.ndarray) -> Iterator[Row]:
    for first, conditional, ids in zip(*sequences, strict=True):
        rows = _Rows(conditional, ids, bool(np.isfinite(first).all() and np.isfinite(conditional).all()))
        yield rows.ranked(first, 1) if len(ids) else CHILDLESS
        rows.known.clear()  # which refer to `rows`: garbage otherwise, until Python looks for it


class _Rows:
    """The rows of one sequence."""

    def __init__(self, conditional: np.ndarray, ids: np.ndarray, whole: bool) -> None:
        """conditional [L-1, K, K], ids [L, K]. `whole`: every candidate is one."""
        self._conditional, self._ids, self._whole = conditional, ids, whole
        self.known: dict[tuple[int, int], Row] = {}

    def below(self, depth: int, candidate: int) -> Row:
        """The children of that candidate of that depth."""
        if depth == len(self._ids):
            return CHILDLESS
        row = self.known.get((depth, candidate))
        if row is None:
            row = self.known[depth, candidate] = self.ranked(self._conditional[depth - 1, candidate], depth + 1)
        return row

    def ranked(self, logprobs: np.ndarray, depth: int) -> Row:
        """Candidates of that depth with a finite log-prob, by (log-prob descending, candidate ascending)."""
        order = (-logprobs).argsort(kind="stable")
        if not self._whole:
            order = order[np.isfinite(logprobs[order])]
        return logprobs[order].tolist(), self._ids[depth - 1, order].tolist(), _Below(self, depth, order)


class _Below(dict[int, Row]):
    """By rank, the children of some siblings."""

    def __init__(self, rows: _Rows, depth: int, order: np.ndarray) -> None:
        super().__init__()
        self._rows, self._depth, self._order = rows, depth, order

    def __missing__(self, rank: int) -> Row:
        row = self[rank] = self._rows.below(self._depth, int(self._order[rank]))
        return row
