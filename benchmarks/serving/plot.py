"""Draws a run: tokens/s of both modes and of the peers against concurrency, and where the time of a round goes.

python -m benchmarks.serving.plot benchmarks/results/serving-smollm2-gpu.json docs/images
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ..plot import COLOURS, bare, stack
from ..run import where

LINES: dict[str, dict[str, Any]] = {
    "plain": {"color": COLOURS[2]},
    "speculative": {"color": COLOURS[0], "linewidth": 2.5},
}
PEER_COLOURS = (COLOURS[4], COLOURS[1], "#7d5ba6")


def draw(result: dict[str, Any], folder: Path) -> None:
    """Write serving-NAME.png; nothing where no concurrency was measured."""
    if not result["runs"]:
        return
    figure, (speed, plain, speculative) = plt.subplots(1, 3, figsize=(14, 4.4), layout="constrained")
    _speed(speed, result)
    for axis, mode in ((plain, "plain"), (speculative, "speculative")):
        rounds = [
            (
                str(run["settings"]["concurrency"]),
                run["stage_ms_per_round"][mode] | {"rest": run["rest_ms_per_round"][mode]},
            )
            for run in result["runs"]
        ]
        stack(axis, rounds)
        axis.set(title=f"Where the time of a round goes, {mode}", xlabel="streams", ylabel="ms")
    plain.get_legend().remove()  # the same colours beside it
    bare(speed, plain, speculative)
    drafter = ", SYNTHETIC DRAFTER" if result["synthetic_drafter"] else ""
    figure.suptitle(f"{result['model']}{drafter}, {where(result)}, greedy, {result['date'][:10]}", fontsize=10)
    figure.savefig(folder / f"serving-{result['name']}.png", dpi=110)
    plt.close(figure)


def _speed(axis: Any, result: dict[str, Any]) -> None:
    streams = [run["settings"]["concurrency"] for run in result["runs"]]
    for mode, style in LINES.items():
        speeds = [run[f"{mode}_tokens_per_s"] for run in result["runs"]]
        axis.plot(streams, speeds, marker="o", label=mode, **style)
    for run in result["runs"]:
        at = run["settings"]["concurrency"], run["speculative_tokens_per_s"]
        axis.annotate(f"{run['speedup']:.2f} ×", at, (0, 7), textcoords="offset points", ha="center", fontsize=8)
    for (name, peer), colour in zip(result["peers"].items(), PEER_COLOURS, strict=False):
        if peer["runs"]:
            points = sorted((int(streams), run["tokens_per_s"]) for streams, run in peer["runs"].items())
            axis.plot(*zip(*points, strict=True), marker="s", linestyle="--", label=name, color=colour)
    axis.set(xscale="log", yscale="log", title="Speed, all streams together", xlabel="streams", ylabel="tokens/s")
    axis.set_xticks(streams, [str(n) for n in streams], minor=False)
    axis.set_xticks([], minor=True)
    axis.margins(0.1)
    axis.legend(frameon=False)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
