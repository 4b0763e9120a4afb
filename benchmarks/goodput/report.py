"""What the windows say: a table and curves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from ..plot import COLOURS, bare
from ..run import save, table, where

TIMES = ("ttft", "gap", "token")


def points(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A point for each rate and budget: counts of all its windows by second, medians of their times."""
    found = []
    for rate in result["settings"]["rates"]:
        for budget in result["settings"]["budgets"]:
            windows = [w for w in result["windows"] if (w["rate"], w["budget"]) == (rate, budget)]
            if not windows:
                continue
            total = {
                name: sum(w[name] for w in windows) for name in ("seconds", "requests", "good", "good_tokens", "tokens")
            }
            times = {
                f"{kind}_{part}": sorted(w[f"{kind}_{part}"] for w in windows)[len(windows) // 2]
                for kind in TIMES
                for part in ("p50", "p99")
            }
            found.append({
                "rate": rate,
                "budget": str(budget),
                "goodput": total["good_tokens"] / total["seconds"],
                "tokens_per_s": total["tokens"] / total["seconds"],
                "in_time": total["good"] / max(1, total["requests"]),
                **times,
            })  # fmt: skip
    return found


def markdown(result: dict[str, Any]) -> str:
    settings = result["settings"]
    header = ("requests/s", "budget", "goodput, tokens/s", "in time", "tokens/s", "first token p50 / p99, s")
    header += ("delta p50 / p99, ms", "by token p50 / p99, ms")
    rows = []
    for point in points(result):
        first = f"{point['ttft_p50']:.2f} / {point['ttft_p99']:.2f}"
        rest = [f"{1e3 * point[f'{kind}_p50']:.0f} / {1e3 * point[f'{kind}_p99']:.0f}" for kind in TIMES[1:]]
        speeds = (f"{point['goodput']:.1f}", f"{point['in_time']:.2f}", f"{point['tokens_per_s']:.1f}")
        rows.append((f"{point['rate']:g}", point["budget"], *speeds, first, *rest))
    objective = (
        f"In time: the first token within {settings['first']:g} s, then {1e3 * settings['token']:g} ms by token."
    )
    return (
        "\n".join(
            [f"`{result['command']}`, {result['date'][:10]}, {where(result)}", "", objective, "", *table(header, rows)]
        )
        + "\n"
    )


def write(result: dict[str, Any], folder: Path) -> None:
    stem = folder / f"goodput-{result['name']}"
    save(stem, result, markdown(result))
    draw(result, stem.with_name(f"{stem.name}.png"))


def draw(result: dict[str, Any], path: Path) -> None:
    """Goodput and times over the rate, a colour for each budget, 99th percentiles dashed."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    found = points(result)
    panels = (
        ("Tokens/s of answers in time", "goodput", None, 1),
        ("Time to first token, s", "ttft_p50", "ttft_p99", 1),
    )
    panels += (("Time by token, ms", "token_p50", "token_p99", 1e3),)
    for axis, (title, middle, late, unit) in zip(axes, panels, strict=True):
        for number, budget in enumerate(map(str, result["settings"]["budgets"])):
            mine = [point for point in found if point["budget"] == budget]
            for key, style in ((middle, "-"), (late, "--")):
                if key:
                    values = [unit * point[key] for point in mine]
                    label = budget if style == "-" else None
                    axis.plot([p["rate"] for p in mine], values, style, marker="o", color=COLOURS[number], label=label)
        axis.set(title=title, xlabel="requests/s", ylim=0)
        axis.legend(title="budget", frameon=False)
    bare(*axes)
    figure.suptitle(f"{result['name']}, requests at random, {where(result)}, {result['date'][:10]}", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)
