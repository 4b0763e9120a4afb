"""Draws a chaos run: what all streams got over time with the kills in it, and what each kind of kill cost.

python -m benchmarks.chaos.plot benchmarks/results/chaos-smollm2-cpu.json docs/images
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
from .processes import KINDS

LOOK = dict(zip(KINDS, ("#f0b27a", "#d9730d", "#85b3d1", "#1f5fa8", "#8fd0a5", "#2f8a5b"), strict=True))


def draw(result: dict[str, Any], folder: Path) -> None:
    """Write chaos-NAME.png; nothing where it never came to the kills."""
    if not result["kills"]:
        return
    figure, (course, cost) = plt.subplots(1, 2, figsize=(14, 4.4), layout="constrained", width_ratios=(3, 2))
    _course(course, result)
    _cost(cost, result)
    bare(course, cost)
    machine, chaos = result["machine"], result["chaos"]
    figure.suptitle(
        f"{result['model']}, {machine['cpu']}, {machine['cores']} cores, {result['date'][:10]}: {len(result['kills'])} "
        f"kills, {chaos['streams']} streams, {len(chaos['failed'])} failed, {len(chaos['changed'])} changed",
        fontsize=10,
    )
    figure.savefig(folder / f"chaos-{result['name']}.png", dpi=110)
    plt.close(figure)


def _course(axis: Any, result: dict[str, Any]) -> None:
    chunks = result["chaos"]["chunks"]
    axis.fill_between(range(len(chunks)), chunks, step="post", color=COLOURS[3])
    for kill in result["kills"]:
        axis.axvline(kill["at_s"], color=LOOK[kill["kind"]], linewidth=2)
    axis.set_xlim(0, len(chunks))
    axis.set(title="Chunks that all streams got", xlabel="s; a line is a kill, coloured as on the right", ylabel="1/s")


def _cost(axis: Any, result: dict[str, Any]) -> None:
    """A row for each kind; a dot for every time that a stream got nothing, a ring for when the service was whole again."""
    for kill in result["kills"]:
        if kill["recovered_s"] is not None and kill["alone"]:
            row, colour = KINDS.index(kill["kind"]), LOOK[kill["kind"]]
            axis.plot(kill["still_s"], row, "o", color=colour)
            axis.plot(kill["recovered_s"], row, "o", color=colour, fillstyle="none")
    axis.set_yticks(range(len(KINDS)), KINDS)
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.set(title="● longest time without a chunk  ○ whole again", xlabel="s after a kill that came alone")


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
