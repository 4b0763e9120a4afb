"""What a sweep found: JSON, Markdown tables, and the answers in a sentence each. Simulates nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..run import save, table
from . import plot

KNEE = 0.95  # of the most tokens per second: what is near enough to it

Point = dict[str, Any]


def write(result: dict[str, Any], folder: Path) -> None:
    """Write simulator-NAME.json, .md and .png."""
    save(folder / f"simulator-{result['name']}", result, markdown(result))
    plot.draw(result, folder / f"simulator-{result['name']}.png")


def markdown(result: dict[str, Any]) -> str:
    asked = result["settings"]
    spread = f", spread {asked['spread']:g}" if asked["spread"] else ""
    lines = [
        f"Simulated, {result['name']}. Costs: {result['source']}.",
        "",
        f"`{result['command']}`, {result['date'][:10]}; prompts of {asked['prompt_tokens']} tokens, answers of "
        f"{asked['answer_tokens']}{spread}; budget {asked['budget']}; a batch of up to {result['limits']['max_sequences']}.",
        "",
        *_drafters(result["drafters"]),
        "",
        *_pods(result["pods"], asked),
    ]
    return "\n".join(lines) + "\n"


def knee(points: Sequence[Point]) -> tuple[float, float]:
    """Fewest drafters per verifier that give nearly the most tokens per second; times plain decoding's, where that was run."""
    most = max(point["tokens_per_s"] for point in points)
    fewest = min((p for p in points if p["tokens_per_s"] >= KNEE * most), key=lambda p: p["per_verifier"])
    plain = next((p["tokens_per_s"] for p in points if not p["per_verifier"]), 0.0)
    return fewest["per_verifier"], fewest["tokens_per_s"] / plain if plain else 0.0


def by(points: Iterable[Point], key: str) -> dict[Any, list[Point]]:
    found: dict[Any, list[Point]] = {}
    for point in points:
        found.setdefault(point[key], []).append(point)
    return found


def _drafters(points: list[Point]) -> list[str]:
    """A line for each number of drafters, two columns for each load."""
    loads = by(points, "streams")
    head = ["drafters per verifier"]
    for streams in loads:
        head += [
            f"{streams} streams a pod: tokens/s a verifier",
            "time between rounds, ms: p50",
            "p99",
            "drafters busy",
        ]
    rows = []
    for each, row in by(points, "per_verifier").items():
        cells = [f"{each:g}"]
        for one in row:
            times = [f"{1e3 * one[key]:.0f}" for key in ("gap_p50_s", "gap_p99_s")]
            cells += [f"{one['tokens_per_s'] / one['pods']:.0f}", *times, f"{one['drafter_busy']:.0%}" if each else "–"]
        rows.append(cells)
    lines = [
        "**Drafters per verifier.** Below one, a drafter is shared, which the service refuses as yet.",
        "",
        *table(head, rows),
        "",
    ]
    for streams, row in loads.items():
        fewest, gain = knee(row)
        times = f", {gain:.2f} times plain decoding" if gain else ""
        lines.append(f"- {streams} streams a pod: {fewest:g} give {KNEE:.0%} of the most{times}.")
    return lines


def _pods(points: list[Point], asked: dict[str, Any]) -> list[str]:
    """A line for each load; with failures beside it."""
    faulty = {(p["pods"], p["part"]): p for p in points if p["failures"]}
    head = ("pods", "load", "requests/s", "tokens/s", "TTFT, s: p50", "p99", "time between rounds, ms: p50", "p99")
    head += ("ms a token: p50", "p99", "drafters busy", "refused", "with failures: tokens/s", "TTFT p99, s", "refused")
    rows = []
    for one in points:
        if one["failures"]:
            continue
        other = faulty[one["pods"], one["part"]]
        times = [f"{one[f'ttft_{q}_s']:.2f}" for q in ("p50", "p99")]
        times += [
            f"{1e3 * one[f'{what}_{q}_s']:.{digits}f}"
            for what, digits in (("gap", 0), ("token", 1))
            for q in ("p50", "p99")
        ]
        cells = [one["pods"], f"{one['part']:g}", f"{one['rate']:.3g}", f"{one['tokens_per_s']:,.0f}", *times]
        cells += [f"{one['drafter_busy']:.0%}", one["refused"]]
        cells += [f"{other['tokens_per_s']:,.0f}", f"{other['ttft_p99_s']:.2f}", other["refused"]]
        rows.append(cells)
    rates, recovery = asked["failures"], asked["recovery"]
    return [
        f"**Pods.** {asked['per_verifier']:g} drafters per verifier; load 1 is as many requests as the pods can answer. Above "
        f"it times only say how long the queue has grown in {asked['seconds']:g} s. With failures, a drafter fails "
        f"{rates[0]:g} times an hour and is back after {recovery[0]:g} s, a verifier {rates[1]:g} times and after "
        f"{recovery[1]:g} s.",
        "",
        *table(head, rows),
        "",
        *_most(points),
    ]


def _most(points: list[Point]) -> Iterable[str]:
    """What each number of pods delivers, over all loads."""
    for pods, row in by(points, "pods").items():
        sound, faulty = (max(p["tokens_per_s"] for p in row if p["failures"] is failing) for failing in (False, True))
        yield (
            f"- {pods} pods: at most {sound:,.0f} tokens/s, {sound / pods:,.0f} a pod; {faulty:,.0f} with failures, "
            f"{faulty / sound:.0%} of it."
        )
