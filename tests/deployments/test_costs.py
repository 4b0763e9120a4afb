"""What rounds take is learned from rounds, whatever their curve looks like."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.deployments.costs import Costs, Curve, StepCost, StepSize, knots


@given(st.integers(1, 3000))
def test_knots_ascend_to_the_largest(largest: int) -> None:
    found = knots(largest)
    assert found == sorted(set(found)) and (found[0], found[-1]) == (1, max(2, largest))
    assert all(after <= 2 * before for before, after in itertools.pairwise(found))


def test_nothing_is_free_once_it_is_known() -> None:
    curve = Curve(64)
    assert curve([1, 64]).tolist() == [0, 0]
    curve.observe(8, 3.0)
    assert curve([1, 8, 100]).tolist() == [3, 3, 3]
    curve.observe(16, 5.0)
    assert curve([8, 12, 16, 24]).tolist() == [3, 4, 5, 7]  # beyond what was seen it goes on as between the last two


@given(st.lists(st.floats(0.1, 1), min_size=9, max_size=9), st.integers(0, 9))
@settings(deadline=None, max_examples=30)
def test_any_curve_is_learned(heights: list[float], seed: int) -> None:
    """Up and down, as where a mixture of experts or a graph's bucket ends."""
    at = np.array([1, 2, 3, 4, 6, 8, 12, 16, 20])
    random, curve = np.random.default_rng(seed), Curve(20)
    for count in random.permutation(np.repeat(np.arange(1, 21), 150)):
        curve.observe(int(count), float(np.interp(count, at, heights)) * random.uniform(0.95, 1.05))
    assert np.allclose(curve(at), heights, rtol=0.1, atol=0.1 * max(heights))


def test_one_stall_is_forgotten_and_a_slower_machine_is_not() -> None:
    curve = Curve(64)
    for count in (1, 8, 64):
        curve.observe(count, 0.01 * count)
    for _ in range(30):
        curve.observe(8, 0.08)
    curve.observe(8, 30.0)
    assert 0.08 < curve(8) < 0.085
    for _ in range(300):
        curve.observe(8, 0.16)
    assert curve(8) == pytest.approx(0.16, rel=0.02)
    assert curve(1) > 0.0125 and curve(64) > 0.8, "sizes that did not run are taken to be slower, too"


def test_a_step_is_told_apart_into_rows_sequences_and_context() -> None:
    def real(size: StepSize) -> float:
        rows = 0.03 + 0.0006 * size.rows + 0.001 * (size.sequences - 1) + 0.0005 * size.trees
        return rows + 4e-6 * size.read + 5e-7 * size.attended

    cost = StepCost(1024)
    sizes = [StepSize(2**i) for i in range(10)]
    sizes += [StepSize(16, 16), StepSize(144, 16, 16), StepSize(9, 1, 1)]
    sizes += [StepSize(1, 1, 0, 2000, 2000), StepSize(64, 1, 0, 2000, 64 * 2000)]
    assert not cost.known
    cost.measured([(size, real(size)) for size in sizes])
    assert cost.known
    for size in (StepSize(40, 8, 8, 800, 4000), StepSize(17, 1, 1, 4000, 17 * 4000), StepSize(100, 4)):
        assert float(cost.rows(size.rows)) + cost.beside(size) == pytest.approx(real(size), rel=0.03)


def test_a_round_is_its_step_its_draft_and_the_rest() -> None:
    costs = Costs(128, 8)
    costs.step.measured([(StepSize(1), 0.01), (StepSize(128), 0.02)])
    stages = {"draft": 0.004, "build": 0.001, "verify": 0.014, "accept": 0.001, "commit": 0.001}
    costs.observe(StepSize(64, 4), stages, 0.022, drafted=4, levels=8, kind="after")
    assert costs.draft(4, 8) == pytest.approx(0.005)
    assert costs.draft(4, 4) == costs.draft(0, 8) == 0
    assert costs.rest("after", 4) == costs.rest("before", 4) == pytest.approx(0.003), "as long as nobody knows better"
    costs.observe(StepSize(64, 4), {**stages, "draft": 0.5}, 0.022, drafted=0, levels=8, kind="plain")
    assert costs.draft(4, 8) == pytest.approx(0.005), "what was no draft is none's cost"
    costs.observe(StepSize(64, 4), stages, 0.021, drafted=4, levels=8, kind="before")
    assert costs.rest("before", 4) == pytest.approx(0.002) and costs.rest("after", 4) == pytest.approx(0.003)
    assert costs.rest("plain", 4) == pytest.approx(0.008)
