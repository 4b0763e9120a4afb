"""Counts of rounds: they add up, and their figures follow from their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.drafter.training.tallies import Cells, Tally, Trial, total

HORIZON = 5
CELLS = Cells((0.1, 0.5, 0.9), 3)
Round = tuple[int, list[Trial], int]


@st.composite
def rounds(draw: st.DrawFn) -> Round:
    """Accepted tokens, trials, known depths: on the way one hit a depth, after it misses alone."""
    accepted = draw(st.integers(0, HORIZON))
    chance = st.floats(0.001, 1.0).map(math.log)
    trials = [(depth, draw(chance), True) for depth in range(accepted)]
    trials += [(depth, draw(chance), False) for depth in range(min(accepted + 1, HORIZON)) if draw(st.booleans())]
    return accepted, trials, draw(st.integers(accepted, 2 * HORIZON))


def counted(played: list[Round]) -> Tally:
    tally = Tally.empty(HORIZON, CELLS)
    for accepted, trials, known in played:
        tally.add(accepted, trials, known)
    return tally


@given(st.lists(rounds(), min_size=1))
def test_figures_follow_from_the_rounds(played: list[Round]) -> None:
    tally = counted(played)
    lengths = [accepted for accepted, _, _ in played]
    assert tally.rounds == len(played) == tally.histogram.sum()
    mean = (tally.histogram * np.arange(HORIZON + 1)).sum() / len(played)
    assert tally.acceptance_length == pytest.approx(mean + 1) == pytest.approx(np.mean(lengths) + 1)
    assert tally.accepted.tolist() == [sum(n > d for n in lengths) for d in range(HORIZON)]
    assert (tally.accepted <= tally.reached).all() and tally.reached[0] <= len(played)
    decided = [trial for _, trials, known in played for trial in trials if trial[0] < known]
    assert tally.trials.sum() == len(decided)
    assert tally.hits.sum() == sum(lengths), "each accepted token is the hit of one trial"
    assert tally.said.sum() == pytest.approx(sum(math.exp(logprob) for _, logprob, _ in decided))
    assert tally.promised.sum() == pytest.approx(tally.said.sum())
    assert (tally.hits <= tally.trials).all() and (tally.said <= tally.trials + 1e-9).all()
    assert 0 <= tally.calibration_error() <= 1


@given(st.lists(rounds()), st.lists(rounds()))
def test_tallies_add_up(first: list[Round], second: list[Round]) -> None:
    both, whole = total([{"chain": counted(first)}, {"chain": counted(second)}])["chain"], counted(first + second)
    for name in ("histogram", "reached", "trials", "hits", "promised", "said"):
        assert getattr(both, name) == pytest.approx(getattr(whole, name))


def test_cells_and_their_error() -> None:
    tally = Tally.empty(HORIZON, CELLS)
    tally.add(1, [(0, math.log(0.8), True), (0, math.log(0.05), False), (1, math.log(0.5), False)], known=9)
    tally.add(4, [(d, math.log(0.95), True) for d in range(4)], known=4)
    tally.add(0, [(0, math.log(0.6), False)], known=0)  # the answer has ended: nothing is known
    assert tally.trials.tolist() == [[1, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 2]], "deeper trials count as the last depth"
    assert tally.hits.tolist() == [[0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 2]], "an edge belongs to the cell below it"
    assert tally.reached.tolist() == [2, 2, 1, 1, 0]
    assert tally.calibration_error(0) == pytest.approx((0.05 + 0.2 + 0.05) / 3)
    assert tally.calibration_error() == pytest.approx((0.05 + 0.5 + 0.2 + 4 * 0.05) / 7)


def test_other_cells_do_not_add_up() -> None:
    with pytest.raises(ValueError, match="other cells"):
        Tally.empty(HORIZON, CELLS) + Tally.empty(HORIZON, Cells())


def test_nothing_is_zero() -> None:
    empty = Tally.empty(HORIZON, CELLS)
    assert (empty.rounds, empty.acceptance_length, empty.calibration_error()) == (0, 0.0, 0.0)
