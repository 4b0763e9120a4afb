"""The plot of a training run: loss and drafted tokens over training time. Knows only the lines of metrics.jsonl."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

FIRST, SECOND, QUIET = "#1f5fa8", "#d9730d", "#666666"


def save_plot(metrics: list[dict[str, Any]], path: Path, target: str, device: str) -> str:
    """Writes the plot as PNG; returns a line that says what was done."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed (pip install 'ddtree-serve[train]')"
    draw(metrics, target, device).savefig(path, dpi=120)
    return f"plot: {path.name}"


def draw(metrics: list[dict[str, Any]], target: str, device: str) -> Any:
    """The matplotlib `Figure`; two axes."""
    from matplotlib.figure import Figure

    last = metrics[-1]
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    figure.suptitle(f"Training a drafter for {target}", x=0.01, ha="left", fontsize=13, fontweight="bold")
    source = f"{last['step']:,} steps in {last['seconds']:.0f} s on {device}, {last['passes']} passes over the data"
    figure.supxlabel(
        f"{source}; validation: fixed blocks of held-back answers", x=0.99, ha="right", fontsize=8, color=QUIET
    )
    losses, lengths = figure.subplots(1, 2)
    # The first training value is the mean since the random start and would stretch the axis.
    _line(losses, metrics[1:] or metrics, "train_loss", "training, mean since the point before", SECOND)
    _line(losses, metrics, "loss", "validation", FIRST)
    losses.set_title("Loss (cross-entropy, early slots weigh more)", loc="left", fontsize=11)
    losses.set_ylabel("nats per drafted token")
    _line(lengths, metrics, "chain_greedy", "in greedy answers", FIRST)
    _line(lengths, metrics, "chain_sampled", "in sampled answers", SECOND)
    lengths.set_title("Accepted from a random position, chain, validation", loc="left", fontsize=11)
    lengths.set_ylabel("tokens per draft, bonus included")
    lengths.set_ylim(bottom=1.0)
    for axes, place in ((losses, "upper right"), (lengths, "upper left")):
        axes.set_xlabel("training time in s")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc=place, frameon=False, fontsize=9)
    return figure


def _line(axes: Any, metrics: list[dict[str, Any]], key: str, label: str, colour: str) -> None:
    """A curve with its last value written beside it."""
    x, y = [m["seconds"] for m in metrics], [m[key] for m in metrics]
    axes.plot(x, y, marker="o", markersize=3.5, linewidth=1.6, label=label, color=colour)
    axes.annotate(
        f"{y[-1]:.2f}", (x[-1], y[-1]), (6, 0), textcoords="offset points", va="center", fontsize=9, color=colour
    )
    axes.margins(x=0.07)
