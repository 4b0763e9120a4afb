"""What the windows say: tables and curves."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ..plot import COLOURS, bare
from ..run import save

Speeds = dict[str, float]  # tokens per second by budget


def speeds(result: dict[str, Any]) -> dict[tuple[int, int], Speeds]:
    """By context and streams; all windows of a mode together."""
    sums: dict[tuple[int, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    for window in result["windows"]:
        total = sums[window["context"], window["streams"]][str(window["budget"])]
        total[0] += window["tokens"]
        total[1] += window["seconds"]
    return {point: {mode: tokens / taken for mode, (tokens, taken) in modes.items()} for point, modes in sums.items()}


def markdown(result: dict[str, Any]) -> str:
    """A line for each point: all modes, and auto against the best of the others."""
    modes = [str(budget) for budget in result["settings"]["budgets"]]
    lines = [
        f"`{result['command']}`, {result['date'][:10]}, {result['machine']['cpu']}; tokens/s",
        "",
        "| context | streams | " + " | ".join(modes) + " | auto / plain | auto / best |",
        "|---" * (len(modes) + 4) + "|",
    ]
    for (context, streams), found in speeds(result).items():
        cells = [f"{found[mode]:.1f}" if mode in found else "" for mode in modes]
        others = [speed for mode, speed in found.items() if mode != "auto"]
        if "auto" in found and others:
            plain = f"{found['auto'] / found['0']:.2f}" if "0" in found else ""
            cells += [plain, f"{found['auto'] / max(others):.2f}"]
        lines.append(f"| {context} | {streams} | " + " | ".join(cells) + " |")
    forecast, accepted = (sum(w[name] for w in result["windows"]) for name in ("forecast_tokens", "forecast_accepted"))
    if accepted:
        lines += ["", f"Draft tokens that auto expected to be accepted, by those that were: {forecast / accepted:.3f}"]
    return "\n".join(lines) + "\n"


def write(result: dict[str, Any], folder: Path) -> None:
    stem = folder / f"budgets-{result['name']}"
    save(stem, result, markdown(result))
    draw(result, stem.with_name(f"{stem.name}.png"))


def draw(result: dict[str, Any], path: Path) -> None:
    """Speed against streams, by context, in times of plain decoding."""
    found = speeds(result)
    contexts = sorted({context for context, _ in found})
    figure, axes = plt.subplots(1, len(contexts), figsize=(6 * len(contexts), 4.2), layout="constrained", squeeze=False)
    for axis, context in zip(axes[0], contexts, strict=True):
        for number, budget in enumerate(map(str, result["settings"]["budgets"])):
            points = [
                (n, modes[budget] / modes["0"])
                for (c, n), modes in found.items()
                if c == context and {budget, "0"} <= modes.keys()
            ]
            style = {"linewidth": 3, "zorder": 3} if budget == "auto" else {"linewidth": 1.2}
            if points:
                axis.plot(
                    *zip(*points, strict=True),
                    marker="o",
                    markersize=3,
                    label=budget,
                    color=COLOURS[number % len(COLOURS)],
                    **style,
                )
        streams = sorted({n for c, n in found if c == context})
        axis.set(
            xscale="log", title=f"context {context}", xlabel="streams", ylabel="tokens/s, plain decoding = 1", ylim=0
        )
        axis.set_xticks(streams, [str(n) for n in streams], minor=False)
        axis.set_xticks([], minor=True)
        axis.legend(title="budget", frameon=False)
    bare(*axes[0])
    figure.savefig(path, dpi=110)
    plt.close(figure)
