"""The chaos run's parts without a service: what it calls failed, changed and left behind, and what it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos import plot, report
from benchmarks.chaos.findings import compare, per_kill, speed
from benchmarks.chaos.monkey import Kill
from benchmarks.chaos.processes import KINDS, find
from benchmarks.chaos.streams import Ask, Stream
from ddtree.deployments.commands.machine import Machine

ASK = Ask("Count.", 4)


def stream(token_ids: list[int], times: list[float], **changes: Any) -> Stream:
    text = "".join(f"{token} " for token in token_ids)
    whole = {"text": text, "completion_tokens": len(token_ids), "finish_reason": "length"}
    return Stream(ASK, times, token_ids=token_ids, **{**whole, **changes})


RIGHT = stream([1, 2, 3, 4], [0.0, 1.0, 2.0])


@pytest.mark.parametrize(
    ("got", "first"),
    [
        (stream([1, 3, 4], [0.0]), 1),  # one is lost
        (stream([1, 2, 2, 3, 4], [0.0]), 2),  # one came twice
        (stream([1, 2, 3, 9], [0.0]), 3),
        (stream([1, 2, 3], [0.0]), 3),
        (stream([1, 2, 3, 4], [0.0], text="1 2 2 3 4 "), 4),  # in what was streamed alone
    ],
)
def test_an_answer_that_changed_is_found(got: Stream, first: int) -> None:
    (changed,) = compare([got, RIGHT], {ASK: RIGHT})["changed"]
    assert changed["first_difference"] == first


def test_streams_that_failed_or_were_cut_off_are_counted_apart() -> None:
    failed = stream([], [0.0], finish_reason=None, error="500")
    cut = stream([1], [0.0], finish_reason=None)
    found = compare([failed, cut, RIGHT], {ASK: RIGHT})
    assert found["failed"] == ["500"] and found["cut"] == 1 and found["changed"] == []


def test_a_kill_is_charged_with_the_longest_gap_around_it() -> None:
    streams = [stream([1], [0.0, 1.0, 4.0, 4.5]), stream([1], [3.0, 3.5, 9.0])]
    kills = [Kill("drafter actor", 1, at=0.5, recovered=0.9), Kill("router actor", 2, at=2.0, recovered=3.0)]
    first, second = per_kill(kills, streams, begin=0.0)
    assert first["still_s"] == 1.0 and first["recovered_s"] == pytest.approx(0.4)
    assert second["still_s"] == 3.0, "the second stream had not begun to stand still"


def test_processes_are_found_by_their_titles_among_descendants() -> None:
    command = ["ray::DrafterActor.draft", "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout
        child.stdout.readline()
        assert child.pid in find(os.getpid())["drafter actor"]
        assert child.pid not in find(child.pid)["drafter actor"]
        child.kill()
        child.wait()
        assert child.pid not in find(os.getpid())["drafter actor"]


def test_what_a_run_found_is_written(tmp_path: Path) -> None:
    wrong = stream([1, 2, 9, 4], [0.5, 6.0, 7.0])
    kills = [Kill(kind, i, at=float(i), recovered=i + 0.5, alone=i > 1) for i, kind in enumerate(KINDS)]
    result = {
        "name": "tiny", "model": "m", "command": "c", "date": "2026-01-01T00:00:00", "machine": asdict(Machine.read()),
        "settings": {"streams": 2, "clients": 1, "kills": 6}, "fault_free": speed([RIGHT], 0.0),
        "chaos": speed([RIGHT, wrong], 0.0) | compare([RIGHT, wrong], {ASK: RIGHT}),
        "kills": per_kill(kills, [RIGHT, wrong], 0.0), "leaks": ["2 of 9 pages are taken"], "remarks": ["cut short"],
        "passed": False,
    }  # fmt: skip
    report.write(result, tmp_path)
    plot.draw(result, tmp_path)
    assert json.loads((tmp_path / "chaos-tiny.json").read_text())["chaos"]["changed"][0]["first_difference"] == 2
    text = (tmp_path / "chaos-tiny.md").read_text()
    for words in ("6 of 6 kills", "0 failed, 1 changed", "from token 2 on", "left behind: 2 of 9", "cut short"):
        assert words in text
    assert "| drafter actor | 1 | 0 | – | – | – | – |" in text
    assert "| router replica | 1 | 1 | 5.5 | 5.5 | 0.5 | 0.5 |" in text
    assert (tmp_path / "chaos-tiny.png").stat().st_size > 0
