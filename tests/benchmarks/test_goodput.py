"""The benchmark of goodput: when its requests come, what its clients note, and what it makes of that."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.chaos.streams import Ask
from benchmarks.goodput import report
from benchmarks.goodput.figures import Figures, Objective, figures
from benchmarks.goodput.load import Timed, arrivals, send

from ..deployments.api.served import LocalEngine, serving

ASK = Ask("Count.", 4)


def test_requests_come_at_their_rate_and_the_same_in_every_mode() -> None:
    times = arrivals(20, 500, seed=3)
    assert times == arrivals(20, 500, seed=3) != arrivals(20, 500, seed=4)
    assert times == sorted(times) and times[0] > 0 and times[-1] < 500
    assert len(times) == pytest.approx(20 * 500, rel=0.05)
    gaps = [b - a for a, b in pairwise(times)]
    assert sum(gap > 1 / 20 for gap in gaps) / len(gaps) == pytest.approx(0.3679, rel=0.1), "exponential"


def test_what_is_in_time_counts() -> None:
    """One in time, one whose first token is late, one that is slow, one that never ends, one that was refused, and one from
    before the window, of which some tokens came in it."""
    made = [
        ([10.0, 10.1, 11.0, 11.5, 12.0], [0, 0, 2, 3, 5], "length"),
        ([10.0, 10.1, 13.5, 13.6], [0, 0, 1, 3], "stop"),
        ([11.0, 12.0, 16.0], [0, 1, 3], "length"),
        ([12.0, 12.5, 12.6], [0, 1, 2], None),
        ([12.0], [0], None),
        ([8.0, 9.0, 10.0, 21.0], [0, 3, 7, 8], "length"),
    ]
    streams = [Timed(ASK, times, counts=counts, finish_reason=reason) for times, counts, reason in made]
    found = figures(streams, 10.0, 20.0, Objective(first=2.0, token=0.5))
    assert (found.seconds, found.requests, found.answered, found.good, found.good_tokens) == (10.0, 5, 3, 1, 5)
    assert found.tokens == 5 + 3 + 3 + 2 + 4
    assert found.ttft_p50 == pytest.approx(1.0)
    assert found.ttft_p99 == pytest.approx(3.5, abs=0.1)
    assert found.gap_p50 == pytest.approx(0.5)
    assert found.token_p50 == pytest.approx(1 / 3)
    assert figures([], 0, 1, Objective(1, 1)).requests == 0


def test_clients_of_a_server(tmp_path: Path) -> None:
    """All are answered, whatever the others do, and those that have no end in time are cut off."""
    engine = LocalEngine(tmp_path)
    with serving(engine) as url:
        begin, streams = send(url, ["abc", "Once upon"], [0.0, 0.01, 0.3], 0, 8, patience_s=30)
        assert [stream.finish_reason for stream in streams] == ["length"] * 3
        assert [stream.counts[-1] for stream in streams] == [8] * 3
        assert all(len(stream.counts) == len(stream.times) for stream in streams)
        assert streams[2].times[0] == begin + 0.3 <= streams[2].times[1]
        assert figures(streams, begin, begin + 0.2, Objective(30, 30)).good_tokens == 16
        _, (endless,) = send(url, ["abc"], [0.0], 0, 200, patience_s=0.2)
        assert endless.finish_reason is None and endless.error is None


def test_the_report(tmp_path: Path) -> None:
    figures_of = {0: (10, 40.0), "auto": (20, 60.0)}
    windows = [
        {"rate": rate, "budget": budget, "turn": turn}
        | asdict(Figures(10.0, 20, 20, good, int(10 * speed), 700, 0.5, 1.0 + turn, 0.02, 0.03, 0.01, 0.04))
        for rate in (1.0, 2.0)
        for turn in range(3)
        for budget, (good, speed) in figures_of.items()
    ]
    result = {
        "name": "tiny", "command": "c", "date": "2026-11-30T", "machine": {"cpu": "a CPU", "cores": 2, "gpus": []},
        "settings": {"rates": [1.0, 2.0], "budgets": [0, "auto"], "first": 2, "token": 0.2}, "windows": windows,
    }  # fmt: skip
    report.write(result, tmp_path)
    assert json.loads((tmp_path / "goodput-tiny.json").read_text()) == result
    text = (tmp_path / "goodput-tiny.md").read_text()
    assert "| 1 | 0 | 40.0 | 0.50 | 70.0 | 0.50 / 2.00 | 20 / 30 | 10 / 40 |" in text
    assert "| 2 | auto | 60.0 | 1.00 |" in text
    assert (tmp_path / "goodput-tiny.png").stat().st_size > 10_000
