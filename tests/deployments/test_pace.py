"""A share of the time, and what was saved of it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.deployments.pace import Pace


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 0.2)), max_size=40), st.floats(0, 1), st.floats(0, 2))
def test_no_more_is_taken_than_came(steps: list[tuple[float, float]], share: float, most: float) -> None:
    pace, passed, taken = Pace(share, most), 0.0, 0.0
    for seconds, wanted in steps:
        pace.passed(seconds)
        passed += seconds
        taken += wanted if pace.affords(wanted) else 0.0
    assert taken <= most + share * passed + 1e-9


def test_what_takes_long_is_made_good_before_more_is_done() -> None:
    pace = Pace(0.5, 0.01)
    with pytest.raises(InterruptedError), pace.timed():
        time.sleep(0.03)
        raise InterruptedError
    assert not pace.ready, "what failed took its time, too"
    pace.passed(0.02)
    assert not pace.ready
    pace.passed(10.0)
    assert pace.ready and not pace.affords(0.02), "no more is kept than may be"
