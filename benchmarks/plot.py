"""Draws what `ddtree bench --json` wrote: speed and tokens per round by budget, and where the time of a round goes.

python benchmarks/plot.py benchmarks/results/smollm2-cpu-b*.json --out docs/images/smollm2-cpu.png
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STAGES = ("draft", "build", "verify", "accept", "commit", "rest")
COLOURS = ("#d9730d", "#8a8f98", "#1f5fa8", "#c4c8ce", "#57a773", "#ece3d4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    runs = sorted((json.loads(path.read_text()) for path in options.results), key=lambda r: r["settings"]["budget"])
    draw(runs).savefig(options.out, dpi=110)


def draw(runs: list[dict[str, Any]]) -> Any:
    """Three panels over the runs, which differ in budget alone."""
    budgets = [str(run["settings"]["budget"]) for run in runs]
    figure, (speed, length, time) = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
    bars = speed.bar(budgets, [run["speedup"] for run in runs], color=COLOURS[2], width=0.6)
    speed.bar_label(bars, fmt="%.2f ×")
    speed.axhline(1, color="#8a8f98", linewidth=1)
    speed.set(title="Speed over plain decoding, same run", xlabel="budget (nodes per round)", ylabel="×")
    bars = length.bar(budgets, [run["acceptance_length"] for run in runs], color=COLOURS[0], width=0.6)
    length.bar_label(bars, fmt="%.2f")
    length.axhline(1, color="#8a8f98", linewidth=1)
    length.set(title="Tokens per round", xlabel="budget (nodes per round)", ylabel="accepted + bonus")
    modes = [("plain", runs[0]["stage_ms_per_round"]["plain"])]
    modes += [(budget, run["stage_ms_per_round"]["speculative"]) for budget, run in zip(budgets, runs, strict=True)]
    stack(time, modes)
    time.set(title="Where the time of a round goes", xlabel="budget (nodes per round)", ylabel="ms")
    bare(speed, length, time)
    first = runs[0]
    figure.suptitle(
        f"{first['model']}, {first['machine']['cpu']}, {first['machine']['cores']} cores, concurrency "
        f"{first['settings']['concurrency']}, greedy, {first['date'][:10]}",
        fontsize=10,
    )
    return figure


def stack(axis: Any, rounds: Sequence[tuple[str, dict[str, float]]]) -> None:
    """A bar for each (name, ms by stage); the stages stand on each other in the order of a round."""
    bottom = [0.0] * len(rounds)
    for stage, colour in zip(STAGES, COLOURS, strict=True):
        heights = [stages.get(stage, 0.0) for _, stages in rounds]
        if any(stage in stages for _, stages in rounds):
            axis.bar([name for name, _ in rounds], heights, bottom=bottom, color=colour, width=0.6, label=stage)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axis.legend(frameon=False)


def bare(*axes: Any) -> None:
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
