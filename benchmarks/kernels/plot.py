"""Draws a run's two plots: tree_build by budget, and the attention's share of the matmul rate by prefix length.

python -m benchmarks.kernels.plot benchmarks/results/kernels-h200.json docs/images
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from . import build, mla

BLUE, ORANGE, GREEN, GREY, LIGHT = "#1f5fa8", "#d9730d", "#57a773", "#8a8f98", "#c4c8ce"
STYLES: dict[str, dict[str, Any]] = {
    mla.HOPPER: {"color": BLUE, "linewidth": 2.5},
    mla.PORTABLE: {"color": GREEN},
    mla.TRITON: {"color": ORANGE},
    mla.TWO_PASSES: {"color": GREY},
    mla.PREFIX: {"color": LIGHT, "linestyle": "--"},
    "ddtree": {"color": BLUE, "linewidth": 2.5},
    "Python heap": {"color": ORANGE},
    "sglang links only": {"color": GREY, "linestyle": "--"},
}


def draw(result: dict[str, Any], folder: Path) -> None:
    """Writes kernels-build.png and kernels-mla.png, each where its section was run."""
    for name, section, panel in (("build", build.SECTION, _build), ("mla", mla.SECTION, _mla)):
        figures = [f for f in result["figures"] if f["section"] == section and f["timing"]]
        if figures:
            figure = panel(figures)
            figure.suptitle(f"{figure.get_suptitle()}, {result['gpu']}, {result['date'][:10]}", fontsize=11)
            figure.savefig(folder / f"kernels-{name}.png", dpi=110)
            plt.close(figure)


def _build(figures: list[dict[str, Any]]) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
    for axis, batch in zip(axes, (1, 32), strict=True):
        for name in dict.fromkeys(f["contender"] for f in figures):
            points = _points(figures, name, "budget", batch=batch)
            axis.plot(*points, marker="o", label=name, **STYLES.get(name, {}))
            for x, us in zip(*points, strict=True):
                text, offset = f"{us:,.0f}" if us >= 100 else f"{us:.3g}", (0, -13 if name == "ddtree" else 6)
                axis.annotate(text, (x, us), offset, textcoords="offset points", ha="center", fontsize=8)
        budgets = sorted({f["case"]["budget"] for f in figures})
        axis.set(xscale="log", yscale="log", title=f"batch {batch}", xlabel="budget (nodes)", ylabel="µs a batch")
        axis.set_xticks(budgets, [str(b) for b in budgets], minor=False)
        axis.margins(0.1)
        axis.minorticks_off()
    axes[0].legend(frameon=False)
    return _finish(figure, axes, "Tree construction, 15 depths × 64 candidates")


def _mla(figures: list[dict[str, Any]]) -> Any:
    heads = sorted({f["case"]["heads"] for f in figures})
    batches = sorted({f["case"]["batch"] for f in figures})[:2]
    size = 3 * len(heads), 2.8 * len(batches)
    figure, axes = plt.subplots(
        len(batches), len(heads), figsize=size, layout="constrained", sharey=True, sharex=True, squeeze=False
    )
    for row, batch in zip(axes, batches, strict=True):
        for axis, h in zip(row, heads, strict=True):
            for name in dict.fromkeys(f["contender"] for f in figures):
                points = _points(figures, name, "kv", value="share", batch=batch, heads=h)
                axis.plot(*points, marker="o", markersize=4, label=name, **STYLES.get(name, {}))
            lengths = sorted({f["case"]["kv"] for f in figures})
            axis.set(xscale="log", ylim=(0, 1), title=f"{h} heads, batch {batch}")
            axis.set_xticks(lengths, [f"{n // 1024}K" for n in lengths], minor=False)
            axis.minorticks_off()
    for axis in axes[-1]:
        axis.set_xlabel("committed prefix (slots)")
    for axis in axes[:, 0]:
        axis.set_ylabel("share of the matmul rate")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return _finish(figure, axes.flat, "Attention of 64 tree rows over a latent cache")


def _points(
    figures: list[dict[str, Any]], contender: str, x: str, value: str = "us", **case: int
) -> tuple[list[float], list[float]]:
    found = sorted(
        (f["case"][x], f["timing"]["us"] if value == "us" else f["facts"][value])
        for f in figures
        if f["contender"] == contender and case.items() <= f["case"].items()
    )
    return [a for a, _ in found], [b for _, b in found]


def _finish(figure: Any, axes: Any, title: str) -> Any:
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e8eaed", linewidth=0.8)
        axis.set_axisbelow(True)
    figure.suptitle(title)
    return figure


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
