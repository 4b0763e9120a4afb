"""The choice between rounds that overlap and rounds that do not: what is faster is taken, and tried anew."""

from __future__ import annotations

import pytest

from ddtree.deployments.overlap import STAY, TRIAL, Overlap


def play(overlap: Overlap, rounds: int, sequences: int, speed: dict[bool, float]) -> list[bool]:
    """Rounds of one token each at these tokens a second, by way. Returns the ways."""
    ways = []
    for _ in range(rounds):
        ways.append(overlap.now(sequences))
        overlap.note(1 / speed[ways[-1]], 1)
    return ways


@pytest.mark.parametrize(("speed", "better"), [({False: 1.0, True: 1.5}, True), ({False: 1.0, True: 0.7}, False)])
def test_both_ways_are_tried_and_the_faster_one_stays(speed: dict[bool, float], better: bool) -> None:
    ways = play(Overlap("auto"), 2 * TRIAL + STAY, 8, speed)
    assert ways[:TRIAL] == [False] * TRIAL and ways[TRIAL : 2 * TRIAL] == [True] * TRIAL
    assert ways[2 * TRIAL :] == [better] * STAY


def test_a_machine_that_changes_is_noticed() -> None:
    overlap = Overlap("auto")
    play(overlap, 2 * TRIAL + STAY, 8, {False: 1.0, True: 1.5})
    ways = play(overlap, 2 * (TRIAL + STAY), 8, {False: 1.0, True: 0.5})
    assert ways[-STAY:] == [False] * STAY


def test_equally_fast_rounds_do_not_overlap() -> None:
    assert not any(play(Overlap("auto"), 2 * TRIAL + STAY, 8, {False: 1.0, True: 1.0})[2 * TRIAL :])


def test_batches_of_another_size_are_timed_apart() -> None:
    overlap = Overlap("auto")
    play(overlap, 2 * TRIAL, 16, {False: 1.0, True: 1.5})
    assert play(overlap, TRIAL, 4, {False: 1.0, True: 1.5}) == [False] * TRIAL
    assert overlap.now(16)


@pytest.mark.parametrize("mode", ["on", "off"])
def test_a_fixed_choice_is_kept(mode: str) -> None:
    ways = play(Overlap(mode), TRIAL, 8, {False: 1.0, True: 1.0})  # type: ignore[arg-type]
    assert ways == [mode == "on"] * TRIAL


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_one_sequence_has_no_other_half(mode: str) -> None:
    assert not any(play(Overlap(mode), 3 * TRIAL, 1, {False: 1.0, True: 9.0}))  # type: ignore[arg-type]
