"""The result of `ddtree eval-drafter` as a plot. Knows the result's keys and matplotlib; measures nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FIRST, SECOND, QUIET = "#1f5fa8", "#d9730d", "#666666"
SETS = ("#1f5fa8", "#d9730d", "#2a9d5c", "#8e44ad", "#b8860b", "#c0392b")


def save_plot(result: dict[str, Any], path: Path) -> None:
    """Write the plot, in the format that the path's ending names. Raises ValueError where matplotlib does not know it."""
    draw(result).savefig(path, dpi=120)


def draw(result: dict[str, Any]) -> Any:
    """The matplotlib `Figure`: tokens per round by budget, chances by depth, calibration."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.4), layout="constrained")
    figure.suptitle(f"{result['drafter']} for {result['target']}", x=0.01, ha="left", fontsize=13, fontweight="bold")
    lengths, depths, cells = figure.subplots(1, 3)
    _lengths(lengths, result)
    columns, detail = result["all"]["columns"], result["settings"]["detail"]
    _depths(depths, columns["chain"], columns[str(detail)], detail)
    _cells(cells, columns[str(detail)], detail)
    for axes in (lengths, depths, cells):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    s, rounds = result["settings"], columns["chain"]["rounds"]
    how = "greedy" if not s["temperature"] else f"temperature {s['temperature']:g}"
    text = f"{how}, {result['all']['prompts']} prompts, {rounds:,} rounds of the chain; offline, {s['dtype']} on {s['device']}"
    figure.supxlabel(text, x=0.99, ha="right", fontsize=8, color=QUIET)
    return figure


def _lengths(axes: Any, result: dict[str, Any]) -> None:
    ways = ["chain", *(str(budget) for budget in result["settings"]["budgets"])]
    for i, (name, found) in enumerate(result["sets"].items()):
        y = [found["columns"][way]["acceptance_length"] for way in ways]
        axes.plot(range(len(ways)), y, marker="o", markersize=3.5, label=name, color=SETS[i % len(SETS)])
    axes.set_xticks(range(len(ways)), ways)
    axes.set_ylim(bottom=1.0)
    axes.set_title("Tokens per round, bonus included", loc="left", fontsize=11)
    axes.set_xlabel("nodes of the tree")


def _depths(axes: Any, chain: dict[str, Any], tree: dict[str, Any], detail: int) -> None:
    for column, name, colour in ((chain, "chain", FIRST), (tree, f"tree {detail}", SECOND)):
        rows = column["by_depth"]
        x = [row["depth"] for row in rows]
        axes.plot(
            x, [row["accepted"] for row in rows], marker="o", markersize=3.5, label=f"{name}, accepted", color=colour
        )
        predicted = [row["predicted"] for row in rows]
        axes.plot(x, predicted, linestyle="--", linewidth=1.2, label=f"{name}, predicted", color=colour)
    axes.set_ylim(0, 1.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title("Chance of a further token, by depth", loc="left", fontsize=11)
    axes.set_xlabel("depth")


def _cells(axes: Any, tree: dict[str, Any], detail: int) -> None:
    rows = tree["calibration"]
    most = max(row["nodes"] for row in rows)
    axes.plot([0, 1], [0, 1], color=QUIET, linewidth=0.8, linestyle=":")
    points = [row["predicted"] for row in rows], [row["accepted"] for row in rows]
    axes.plot(*points, color=FIRST, linewidth=1.0, alpha=0.5)
    sizes = [12 + 120 * row["nodes"] / most for row in rows]
    axes.scatter(*points, s=sizes, color=FIRST, label=f"nodes of tree {detail}; size: how many")
    axes.set_title(f"Calibration, error {tree['calibration_error']:.3f}", loc="left", fontsize=11)
    axes.set_xlabel("the drafter says")
    axes.set_ylabel("accepted")
