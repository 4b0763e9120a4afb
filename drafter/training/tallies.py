"""What rounds accepted, and how probable the drafter had called it: counts that add up. Knows no models and no tensors.

A trial is a draft node whose parent was accepted, so that the target's own token decides on it. Only trials say how far what a
drafter says of a token is to be trusted: a node below a wrong one is wrong whatever the drafter thinks of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp

import numpy as np
from numpy.typing import NDArray

Trial = tuple[
    int, float, bool
]  # depth from 0, the drafter's log-probability of the node after its parent, accepted or not


@dataclass(frozen=True)
class Cells:
    """Where trials are told apart."""

    edges: tuple[float, ...] = ()  # probabilities, ascending: cell e has those above e of them
    depths: int = 1  # deeper ones count as the last


UNCUT = Cells()  # all together


@dataclass(frozen=True, eq=False)
class Tally:
    """Counts of rounds of one way to draft; L = the drafter's horizon, D = depths and E = edges of `cells`."""

    cells: Cells
    histogram: NDArray[np.int64]  # [L + 1] rounds by accepted draft tokens
    reached: NDArray[np.int64]  # [L] rounds whose path came to this depth, with the target's token there known
    promised: NDArray[np.float64]  # [L] of those, summed: the drafter's probability that some node is accepted there
    trials: NDArray[np.int64]  # [D, E + 1]
    said: NDArray[np.float64]  # [D, E + 1] the drafter's probabilities of them, summed
    hits: NDArray[np.int64]  # [D, E + 1] those accepted

    @classmethod
    def empty(cls, horizon: int, cells: Cells) -> Tally:
        shape = (cells.depths, len(cells.edges) + 1)
        depth, grid = np.zeros(horizon, np.int64), np.zeros(shape, np.int64)
        return cls(cells, np.zeros(horizon + 1, np.int64), depth, np.zeros(horizon), grid, np.zeros(shape), grid.copy())

    def add(self, accepted: int, trials: Iterable[Trial], known: int) -> None:
        """Counts a round.

        Args:
            accepted: draft tokens.
            trials: of its tree; those at a depth that is not known are left out.
            known: depths at which the target's token is known: the answer may end before the draft does.
        """
        self.histogram[accepted] += 1
        self.reached[: min(accepted + 1, known)] += 1
        for depth, logprob, hit in trials:
            if depth < known:
                probability = exp(logprob)
                cell = min(depth, self.cells.depths - 1), int(np.searchsorted(self.cells.edges, probability))
                self.promised[depth] += probability
                self.trials[cell] += 1
                self.said[cell] += probability
                self.hits[cell] += hit

    def __add__(self, other: Tally) -> Tally:
        if self.cells != other.cells:
            raise ValueError("tallies with other cells do not add up")
        names = ("histogram", "reached", "promised", "trials", "said", "hits")
        return Tally(self.cells, *(getattr(self, name) + getattr(other, name) for name in names))

    @property
    def rounds(self) -> int:
        return int(self.histogram.sum())

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, the bonus token included; 0 without a round."""
        accepted = int(self.histogram @ np.arange(len(self.histogram)))
        return (accepted + self.rounds) / max(1, self.rounds)

    @property
    def accepted(self) -> NDArray[np.int64]:
        """[L] of `reached`, the rounds that accepted a token at this depth."""
        return self.histogram[::-1].cumsum()[::-1][1:]

    def calibration_error(self, depth: int | None = None) -> float:
        """Expected calibration error over the cells (Guo et al. 2017, arXiv 1706.04599): what the drafter says of a cell's
        trials and how often they are accepted differ by so much, averaged over trials. `depth` from 0; None: depths together."""
        rows = slice(None) if depth is None else slice(depth, depth + 1)
        gaps = np.abs((self.said[rows] - self.hits[rows]).sum(0))
        return float(gaps.sum() / max(1, int(self.trials[rows].sum())))


def total(tallies: Iterable[dict[str, Tally]]) -> dict[str, Tally]:
    """Sums by column."""
    out: dict[str, Tally] = {}
    for columns in tallies:
        out = {name: out[name] + tally if name in out else tally for name, tally in columns.items()}
    return out
