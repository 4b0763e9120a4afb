"""What is known of a service before it is simulated: seconds of its stages, tokens that its trees gain, its scheduler's limits.

Written as JSON by the check against a real service (check.py), or computed on paper (paper.py). Knows no time and no requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.deployments.costs import StepSize
from ddtree.deployments.requests import Budget

Knots = Sequence[
    tuple[float, float]
]  # (count, seconds), ascending: straight between two, and beyond the last as before it


def line(knots: Knots, counts: Any) -> NDArray[np.float64]:
    """Seconds at these counts."""
    at, seconds = np.array(knots, np.float64).T
    counts = np.asarray(counts, np.float64)
    slope = (seconds[-1] - seconds[-2]) / (at[-1] - at[-2]) if len(at) > 1 else 0.0
    found: NDArray[np.float64] = np.interp(counts, at, seconds) + slope * np.maximum(0, counts - at[-1])
    return found


class _Table:
    """A line over whole numbers from 0, as a list: a simulation asks for it every round."""

    def __init__(self, knots: Knots) -> None:
        self._knots, self._seconds = knots, [0.0]

    def __getitem__(self, count: int) -> float:
        if count >= len(self._seconds):
            self._seconds = line(self._knots, np.arange(2 * count + 1)).tolist()
        return self._seconds[count]


@dataclass(frozen=True)
class StageCosts:
    """Seconds of a round's parts. Attention takes the longer of reading KV rows and of multiplying by them, as on paper."""

    step: Knots  # verify by rows, of one sequence without context
    draft: Knots  # draft and commit by sequences with a draft, at one drafter
    rest: Knots  # build, accept, messages and what else a round takes, by sequences
    per_sequence: float = 0.0  # of a step, for each beside the first
    per_read: float = 0.0  # of a step, for each KV row of its sequences from before it
    per_attended: float = 0.0  # of a step, for each pair of a row and such a KV row
    draft_per_read: float = 0.0  # of a draft, for each token of its sequences' contexts

    @cached_property
    def _tables(self) -> tuple[_Table, _Table, _Table]:
        return _Table(self.step), _Table(self.draft), _Table(self.rest)

    def verify_s(self, size: StepSize) -> float:
        attention = max(self.per_read * size.read, self.per_attended * size.attended)
        return self._tables[0][size.rows] + self.per_sequence * (size.sequences - 1) + attention

    def draft_s(self, sequences: int, context: int) -> float:
        """`context`: tokens of all of them."""
        return self._tables[1][sequences] + self.draft_per_read * context if sequences else 0.0

    def rest_s(self, sequences: int) -> float:
        return self._tables[2][sequences]


class Acceptance:
    """The chances of so many draft tokens being accepted, by budget. Between two budgets that are known it is a mixture of both,
    by the logarithm of their nodes; all trees of a budget are taken to be alike."""

    def __init__(self, known: Mapping[int, Sequence[float]]) -> None:
        """`known`: by budget above 0, the chance of accepting 0, 1, … draft tokens."""
        self.known = {budget: tuple(chances) for budget, chances in sorted(known.items())}
        depth = max((len(chances) for chances in self.known.values()), default=1)
        self._at = np.log1p([0, *self.known])
        self._chances = np.zeros((1 + len(self.known), depth))
        self._chances[0, 0] = 1.0  # without a tree
        for row, chances in zip(self._chances[1:], self.known.values(), strict=True):
            row[: len(chances)] = np.array(chances) / sum(chances)

    @classmethod
    def geometric(cls, lengths: Mapping[int, float], depth: int) -> Acceptance:
        """Every next token is accepted as probably as the one before, up to `depth`, which gives these acceptance lengths
        (accepted + 1, each from 1 to depth + 1) by budget."""
        return cls({budget: _geometric(length - 1, depth) for budget, length in lengths.items()})

    def chances(self, budget: int) -> NDArray[np.float64]:
        """Of accepting 0, 1, … draft tokens of a tree of so many nodes."""
        at = np.log1p(budget)
        return np.array([np.interp(at, self._at, column) for column in self._chances.T])

    def tokens(self, budget: int) -> float:
        """Gained by a round, the bonus token included."""
        chances = self.chances(budget)
        return 1 + float(chances @ np.arange(len(chances)))


def _geometric(mean: float, depth: int) -> list[float]:
    low, high = 0.0, 1.0
    for _ in range(60):  # the mean grows with the chance of each
        chance = (low + high) / 2
        low, high = (chance, high) if sum(chance**d for d in range(1, depth + 1)) < mean else (low, chance)
    reached = [high**d for d in range(depth + 1)] + [0.0]
    return [reached[d] - reached[d + 1] for d in range(depth + 1)]


@dataclass(frozen=True)
class Limits:
    """Of a pod's scheduler, as the configuration has them."""

    max_sequences: int = 16
    max_waiting: int = 256
    prefill_rows: int = 256
    rebuild_window: int = 128
    horizon: int = 15  # deepest node of a tree
    max_budget: int = 63
    kv_tokens: int = 2**31  # of the pool


@dataclass(frozen=True)
class Profile:
    """A service, as far as a simulation goes."""

    name: str
    source: str  # where the costs come from, in words: measured or computed
    costs: StageCosts
    acceptance: Acceptance
    limits: Limits = field(default_factory=Limits)
    budget: Budget = "auto"

    def write(self, path: Path) -> None:
        content = {name: value for name, value in vars(self).items() if name not in ("costs", "acceptance", "limits")}
        content |= {"costs": asdict(self.costs), "limits": asdict(self.limits), "acceptance": self.acceptance.known}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Profile:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["costs"], content["limits"] = StageCosts(**content["costs"]), Limits(**content["limits"])
        content["acceptance"] = Acceptance({int(budget): c for budget, c in content["acceptance"].items()})
        return cls(**content)
