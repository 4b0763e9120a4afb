"""Draws an elastic run: what all streams got over time, and below it how many drafters there were.

python -m benchmarks.elastic.plot benchmarks/results/elastic-smollm2-cpu.json docs/images
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ..plot import COLOURS, bare
from ..run import where
from .report import outcome


def draw(result: dict[str, Any], folder: Path) -> None:
    """Write elastic-NAME.png; nothing where it never came to the load."""
    if not result["throughput"]:
        return
    layout: dict[str, Any] = {"sharex": True, "height_ratios": (3, 1), "layout": "constrained"}
    figure, (speed, drafters) = plt.subplots(2, 1, figsize=(11, 5.2), **layout)
    _speed(speed, result)
    _drafters(drafters, result)
    bare(speed, drafters)
    figure.suptitle(
        f"{result['model']}, {where(result)}, {result['date'][:10]}: {result['settings']['streams']} streams at a time, "
        f"{result['load']['streams']} in all, {outcome(result['load'])}",
        fontsize=10,
    )
    figure.savefig(folder / f"elastic-{result['name']}.png", dpi=110)
    plt.close(figure)


def _speed(axis: Any, result: dict[str, Any]) -> None:
    """The mean of each phase is a line from when its drafters were there."""
    seconds = result["throughput"]
    axis.stairs(seconds, fill=True, color=COLOURS[3])
    for phase in result["phases"]:
        axis.hlines(phase["tokens_per_s"], phase["reached_s"], phase["ended_s"], color=COLOURS[0], linewidth=2)
        at = (phase["reached_s"] + phase["ended_s"]) / 2, phase["tokens_per_s"]
        text = f"{phase['tokens_per_s']:.1f}"
        axis.annotate(text, at, (0, 5), textcoords="offset points", ha="center", color=COLOURS[0])
    axis.set_xlim(0, len(seconds))
    axis.set(title="Tokens that all streams got, each second and on average", ylabel="tokens/s")


def _drafters(axis: Any, result: dict[str, Any]) -> None:
    end = len(result["throughput"])
    times, numbers = zip(*result["drafters"], (end, result["drafters"][-1][1]), strict=True)
    axis.step(times, numbers, where="post", color=COLOURS[2], linewidth=2)
    for phase in result["phases"]:
        axis.axvline(phase["asked_s"], color=COLOURS[1], linestyle=":")
    axis.set_ylim(0, max(numbers) + 0.5)
    axis.set_yticks(range(max(numbers) + 1))
    axis.set(xlabel="s; a dotted line is where another number was asked for", ylabel="drafters")


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
