"""Stage costs and acceptance from what a real service took at some loads: least squares over sums of whole runs.

A step is taken to grow evenly with its rows and its sequences, drafts and the rest with sequences; a run is one equation of
each. So a few loads say what others take, within the errors that the check shows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .measure import Measured
from .profile import Acceptance, Knots, StageCosts


def costs(points: Sequence[Measured]) -> StageCosts:
    """Points that differ in streams and in budget, one with drafts among them."""
    drafting = [point for point in points if point.budget]
    once, row, sequence = _least_squares(
        [(p.rounds, p.rows, p.entries - p.rounds) for p in points], [p.stages["verify"] for p in points]
    )
    draft = _least_squares(
        [(p.draft_rounds, p.drafted) for p in drafting], [p.stages["draft"] + p.stages["commit"] for p in drafting]
    )
    rest = _least_squares([(p.rounds, p.entries) for p in points], [_rest(p) for p in points])
    return StageCosts(step=_knots(once, row), draft=_knots(*draft), rest=_knots(*rest), per_sequence=float(sequence))


def acceptance(points: Sequence[Measured]) -> Acceptance:
    """By budget, over all points."""
    sums: dict[int, NDArray[np.int64]] = defaultdict(lambda: np.zeros(max(len(p.accepted) for p in points), np.int64))
    for point in points:
        if point.budget:
            sums[point.budget][: len(point.accepted)] += point.accepted
    return Acceptance({budget: (counts / counts.sum()).tolist() for budget, counts in sums.items()})


def _rest(point: Measured) -> float:
    """Seconds in no verify, draft or commit."""
    counted = ("verify", "draft", "commit") if point.budget else ("verify",)
    return point.seconds - sum(point.stages[stage] for stage in counted)


def _knots(first: float, each: float) -> Knots:
    return [(1, first + each), (2, first + 2 * each)]


def _least_squares(parts: Sequence[Sequence[float]], sums: Sequence[float]) -> NDArray[np.float64]:
    """Seconds, none below 0, of each kind of part: the squares of relative errors are least."""
    target = np.array(sums)
    matrix = np.array(parts, np.float64) / target[:, None]
    found, used = np.zeros(matrix.shape[1]), np.ones(matrix.shape[1], bool)
    while used.any():
        found[:] = 0
        found[used] = np.linalg.lstsq(matrix[:, used], np.ones(len(target)), rcond=None)[0]
        if (found >= 0).all():
            break
        used &= found > 0
    return found
