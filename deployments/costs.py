"""What rounds take, by size: measured at the start, and corrected by rounds that run. Knows seconds and counts alone.

Nothing is assumed of a curve's shape but that it is straight between two sizes that were measured: CUDA graphs have steps, and a
mixture of experts reads more weights with every row until it reads them all.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
NEAR, FAR = 0.06, 0.04  # of what a round shows, what the sizes beside its own take over (more at first), and all sizes
DOUBT = 0.5  # of its forecast: a round that was off by more (a stall, a neighbour's work) counts as off by this


class Curve:
    """Seconds over a count."""

    def __init__(self, largest: int) -> None:
        """For counts from 1; beyond `largest` it goes on as between the two before."""
        self._at = np.array(knots(largest), np.float64)
        self._seconds = np.full(len(self._at), np.nan)
        self._seen = np.zeros(len(self._at))  # rounds beside each size

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return not bool(np.isnan(self._seconds).all())

    @property
    def bends(self) -> Numbers:
        """The counts between which it is straight."""
        return self._at

    def __call__(self, counts: Any) -> Numbers:
        """Seconds at these counts: 0 while nothing was observed, so that what was never tried gets tried."""
        counts = np.asarray(counts, np.float64)
        known = ~np.isnan(self._seconds)
        at, seconds = self._at[known], self._seconds[known]
        if not len(at):
            return np.zeros(counts.shape)
        found: Numbers = np.interp(counts, at, seconds)
        if len(at) > 1:
            slope = max(0.0, (seconds[-1] - seconds[-2]) / (at[-1] - at[-2]))
            found = found + slope * np.maximum(0, counts - at[-1])
        return found

    def observe(self, count: int, seconds: float) -> None:
        """A round of this size took so long."""
        after = int(np.clip(np.searchsorted(self._at, count), 1, len(self._at) - 1))
        beside = [after - 1, after]
        part = float(np.clip((count - self._at[after - 1]) / (self._at[after] - self._at[after - 1]), 0, 1))
        weights = np.array([1 - part, part])
        if not self.known:
            self._seconds[beside[int(part > 0.5)]] = seconds
            self._seen[beside] += weights
            return
        forecast = max(float(self(count)), 1e-9)
        self._seen[beside] += weights
        new, forecasts = np.isnan(self._seconds[beside]), self(self._at[beside])
        if new[int(part > 0.5)]:  # nobody has seen its like: all of it counts
            self._seconds[beside] = np.where(
                new & (weights > 0), np.maximum(0, forecasts + seconds - forecast), self._seconds[beside]
            )
            return
        self._seconds[beside] = np.where(new, forecasts, self._seconds[beside])
        off = float(np.clip(seconds - forecast, -DOUBT * forecast, DOUBT * forecast))
        self._seconds *= 1 + FAR * off / forecast
        near = np.maximum(NEAR, 1 / (1 + self._seen[beside])) * weights / (weights @ weights)
        self._seconds[beside] = np.maximum(0, self._seconds[beside] + near * off)


def knots(largest: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, … and `largest`, at least 2: where a curve may bend."""
    found, step = [1, 2], 1
    while found[-1] < largest:
        found += [found[-1] + step, found[-1] + 2 * step]
        step *= 2
    return sorted({at for at in found if at < largest} | {1, max(2, largest)})


@dataclass(frozen=True)
class StepSize:
    """What decides how long a verify step takes."""

    rows: int
    sequences: int = 1
    trees: int = 0  # sequences with a tree of more than its root
    read: int = 0  # KV rows of its sequences from before the step
    attended: int = 0  # pairs of a row and such a KV row of its sequence


TimedSteps = list[tuple[StepSize, float]]  # and the seconds they took


class StepCost:
    """Seconds of a verify step: a curve over its rows, and what more sequences and their contexts add."""

    def __init__(self, largest: int) -> None:
        """`largest`: rows of a step."""
        self.rows = Curve(largest)
        self.per_sequence, self.per_tree, self.per_read, self.per_attended = 0.0, 0.0, 0.0, 0.0

    @property
    def known(self) -> bool:
        """Whether any step was timed."""
        return self.rows.known

    def measured(self, steps: TimedSteps) -> None:
        """Begin with these: steps of one sequence without context or tree, and some with more of all."""
        others: TimedSteps = []
        for size, seconds in steps:
            if size == StepSize(size.rows):
                self.rows.observe(size.rows, seconds)
            else:
                others.append((size, seconds))
        if others:
            parts = [[size.sequences - 1, size.trees, size.read, size.attended] for size, _ in others]
            sizes = np.array(parts, np.float64)
            scale = np.maximum(1, sizes.max(0))
            added = [seconds - float(self.rows(size.rows)) for size, seconds in others]
            found = np.linalg.lstsq(sizes / scale, np.array(added), rcond=None)[0] / scale
            self.per_sequence, self.per_tree, self.per_read, self.per_attended = np.maximum(0, found).tolist()

    def beside(self, size: StepSize) -> float:
        """Seconds on top of those of the rows."""
        more = self.per_sequence * (size.sequences - 1) + self.per_tree * size.trees
        return more + self.per_read * size.read + self.per_attended * size.attended

    def observe(self, size: StepSize, seconds: float) -> None:
        self.rows.observe(size.rows, max(0.0, seconds - self.beside(size)))


class Costs:
    """Of whole rounds: the step, the draft, and the rest, the last two by sequences."""

    def __init__(self, rows: int, sequences: int) -> None:
        """`rows` of the largest step, and its sequences."""
        self.step = StepCost(rows)
        self._draft: dict[int, Curve] = defaultdict(lambda: Curve(sequences))
        self._rest: dict[str, Curve] = defaultdict(lambda: Curve(sequences))

    def draft(self, sequences: int, levels: int) -> float:
        """Seconds of a draft of so many depths."""
        return float(self._draft[levels](sequences)) if sequences else 0.0

    def rest(self, kind: str, sequences: int) -> float:
        """Seconds of the rest of a round of this kind, where it was never tried of that which takes least."""
        if self._rest[kind].known:
            return float(self._rest[kind](sequences))
        return min((float(curve(sequences)) for curve in self._rest.values() if curve.known), default=0.0)

    def observe(
        self, size: StepSize, seconds: dict[str, float], whole: float, drafted: int, levels: int, kind: str
    ) -> None:
        """A round of this kind took `whole` seconds, and so many in its stages; so many of its sequences had a draft of these
        depths."""
        draft = seconds["draft"] + seconds["commit"] if drafted else 0.0  # paths of trees alone are moved
        self.step.observe(size, seconds["verify"])
        if drafted:
            self._draft[levels].observe(drafted, draft)
        self._rest[kind].observe(size.sequences, max(0.0, whole - seconds["verify"] - draft))
