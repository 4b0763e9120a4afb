"""The whole pipeline on a CPU: stages, interruption and resumption, what is published."""

from __future__ import annotations

import json

import pytest

from ddtree.drafter.config import DrafterInfo
from ddtree.drafter.training import TrainOptions, train_drafter


class Interrupt(Exception):
    pass


class Recorder:
    """A report that remembers, and raises at the first line that holds `stop_at`."""

    def __init__(self, stop_at: str | None = None) -> None:
        self.lines: list[tuple[str, float, str]] = []
        self.stop_at = stop_at

    def __call__(self, stage: str, fraction: float, message: str) -> None:
        self.lines.append((stage, fraction, message))
        if self.stop_at and self.stop_at in f"{stage} {message}":
            raise Interrupt(message)

    def stages(self) -> set[str]:
        return {stage for stage, _, _ in self.lines}


def test_interrupted_run_continues_and_publishes(options: TrainOptions) -> None:
    with pytest.raises(Interrupt):
        train_drafter(options, Recorder("train step 0"))
    shards = {p.name: p.stat().st_mtime_ns for p in (options.out_dir / "answers").iterdir()}
    middle = Recorder("sampled")  # the first line after a validation
    with pytest.raises(Interrupt):
        train_drafter(options, middle)
    stopped = int(middle.lines[-1][2].split(",")[0].removeprefix("step "))
    last = Recorder()
    checkpoint = train_drafter(options, last)
    assert shards == {p.name: p.stat().st_mtime_ns for p in (options.out_dir / "answers").iterdir()}
    first = next(message for stage, _, message in last.lines if stage == "train")
    assert first.startswith(f"step {stopped},") and first.endswith("resumed")
    metrics = [json.loads(line) for line in (options.out_dir / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == sorted({m["step"] for m in metrics})
    assert metrics[-1]["seconds"] >= options.training
    print(last.lines, metrics)
    info = DrafterInfo.read(checkpoint)
    assert info.target_layer_ids == (1, 2, 3) and info.mask_token_id == 4
