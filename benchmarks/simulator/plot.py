"""Draws a sweep: speed and use of drafters over drafters per verifier, speed and latency of pods over arrival rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ..plot import COLOURS, bare
from . import report

SHADES = (COLOURS[0], COLOURS[2], COLOURS[4], COLOURS[1], "#7d5ba6")


def draw(result: dict[str, Any], path: Path) -> None:
    figure, ((speed, busy, goodput), (first, gap, failing)) = plt.subplots(
        2, 3, figsize=(15, 8.4), layout="constrained"
    )
    drafters = [point for point in result["drafters"] if point["per_verifier"]]
    for colour, (streams, points) in zip(SHADES, report.by(drafters, "streams").items(), strict=False):
        each = [point["per_verifier"] for point in points]
        style = {"label": f"{streams}", "color": colour, "marker": "o", "markersize": 3}
        most = max(point["tokens_per_s"] for point in points)
        speed.plot(each, [point["tokens_per_s"] / most for point in points], **style)
        busy.plot(each, [point["drafter_busy"] for point in points], **style)
    for axis, label in ((speed, "tokens/s, the most = 1"), (busy, "part of their time that drafters are busy")):
        axis.set(xscale="log", xlabel="drafters per verifier", ylabel=label, ylim=0)
        axis.legend(title="streams a pod", frameon=False)
        ticks = sorted({point["per_verifier"] for point in drafters})
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)
        axis.set_xticks([], minor=True)
    sound = [point for point in result["pods"] if not point["failures"]]
    faulty = [point for point in result["pods"] if point["failures"]]
    _over_rate(goodput, sound, {"-": "tokens_per_s"})
    _over_rate(first, sound, {"-": "ttft_p50_s", "--": "ttft_p99_s"})
    _over_rate(gap, sound, {"-": "gap_p50_s", "--": "gap_p99_s"})
    _over_rate(failing, faulty, {"-": "ttft_p50_s", "--": "ttft_p99_s"})
    goodput.set(xscale="log", yscale="log", title="Goodput", ylabel="tokens/s")
    first.set(xscale="log", yscale="log", title="Time to first token, p50 and p99 (dashed)", ylabel="s")
    gap.set(xscale="log", title="Time between rounds of a stream, p50 and p99 (dashed)", ylabel="s", ylim=0)
    failing.set(xscale="log", yscale="log", title="Time to first token with failures", ylabel="s")
    speed.set_title("Speed by drafters")
    busy.set_title("Use of drafters")
    bare(speed, busy, goodput, first, gap, failing)
    kind = result["source"].split(":")[0]
    figure.suptitle(f"Simulated, {result['name']}: costs {kind}; {result['date'][:10]}", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _over_rate(axis: Any, points: list[dict[str, Any]], lines: dict[str, str]) -> None:
    """A colour for each number of pods, a line style for each figure."""
    for colour, (pods, row) in zip(SHADES, report.by(points, "pods").items(), strict=False):
        for number, (style, key) in enumerate(lines.items()):
            rates = [point["rate"] for point in row]
            label = f"{pods}" if not number else None
            axis.plot(rates, [p[key] for p in row], style, marker="o", markersize=3, color=colour, label=label)
    axis.set_xlabel("requests/s")
    axis.legend(title="pods", frameon=False)
