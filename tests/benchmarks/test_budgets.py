"""The benchmark of budgets: what its clients send and count, and what it makes of that."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.budgets import report
from benchmarks.budgets.windows import Load, Window
from ddtree.deployments.commands.client import ServerError

from ..deployments.api.served import LocalEngine, serving


def test_a_window_counts_what_is_generated_in_it(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path)
    with serving(engine) as url:
        load = Load(url, ["abc", "Once upon"], context=4, streams=3, temperature=0)
        first, second = (load.run(budget, seconds=1.0) for budget in (0, 8))
    assert (first.context, first.streams, first.budget, second.budget) == (4, 3, 0, 8)
    assert all(window.seconds >= 1 and window.tokens > 0 and window.rounds > 0 for window in (first, second))
    assert first.tokens + second.tokens <= engine.loop.totals.generated_tokens
    assert not engine.scheduler.running and not engine.scheduler.waiting, "nothing of one window runs in the next"


def test_a_client_that_fails_ends_the_window(tmp_path: Path) -> None:
    with serving(LocalEngine(tmp_path)) as url, pytest.raises(ServerError, match="maximum"):
        Load(url, ["abc"], 0, 1, 0).run(999, seconds=30)


def test_the_report(tmp_path: Path) -> None:
    speeds = {0: 10, 8: 15, "auto": 18}
    windows = [
        Window(context, 4, budget, 2.0, 2 * n // (1 + context), 9, 11.0 * (budget == "auto"), 10 * (budget == "auto"))
        for context in (0, 1)
        for _ in range(2)
        for budget, n in speeds.items()
    ]
    result = {
        "name": "tiny", "command": "c", "date": "2026-11-30T", "machine": {"cpu": "a CPU"},
        "settings": {"budgets": list(speeds)}, "windows": [asdict(window) for window in windows],
    }  # fmt: skip
    report.write(result, tmp_path)
    assert json.loads((tmp_path / "budgets-tiny.json").read_text()) == result
    text = (tmp_path / "budgets-tiny.md").read_text()
    assert "| 0 | 4 | 10.0 | 15.0 | 18.0 | 1.80 | 1.20 |" in text
    assert "1.100" in text
    assert (tmp_path / "budgets-tiny.png").stat().st_size > 10_000
