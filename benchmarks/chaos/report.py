"""What a chaos run found, as JSON and as Markdown tables. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from ..run import save, table
from .processes import KINDS

TIMES = ("still_s", "recovered_s")


def write(result: dict[str, Any], folder: Path) -> None:
    """Write chaos-NAME.json and chaos-NAME.md."""
    save(folder / f"chaos-{result['name']}", result, markdown(result))


def markdown(result: dict[str, Any]) -> str:
    machine, settings = result["machine"], result["settings"]
    lines = [
        f"{result['model']} on {machine['cpu']}, {machine['cores']} cores, {result['date']}.",
        "",
        f"`{result['command']}`",
        "",
    ]
    if chaos := result["chaos"]:
        lines += [
            f"{len(result['kills'])} of {settings['kills']} kills under {chaos['streams']} streams, "
            f"{settings['clients']} at a time, {chaos['tokens']} tokens in {chaos['seconds']:.0f} s: "
            f"**{len(chaos['failed'])} failed, {len(chaos['changed'])} changed**, {chaos['cut']} cut off.",
            "",
            *_recovery(result),
            "",
        ]
    lines += [f"- failed: {error}" for error in chaos.get("failed", ())]
    lines += [
        f"- changed from token {one['first_difference']} on, temperature {one['temperature']}: {one['prompt']!r}"
        for one in chaos.get("changed", ())
    ]
    lines += [f"- left behind: {what}" for what in result["leaks"]] + [f"- {remark}" for remark in result["remarks"]]
    return "\n".join(lines) + "\n"


def _recovery(result: dict[str, Any]) -> list[str]:
    """A row for each kind; its times are of the kills that came alone."""
    head = ("killed", "times", "alone", "a stream got nothing, s: median", "max", "whole again, s: median", "max")
    rows: list[Iterable[Any]] = []
    for kind in KINDS:
        kills = [kill for kill in result["kills"] if kill["kind"] == kind]
        alone = [kill for kill in kills if kill["alone"] and kill["recovered_s"] is not None]
        cells = [f"{of(kill[key] for kill in alone):.1f}" if alone else "–" for key in TIMES for of in (median, max)]
        rows.append((kind, len(kills), len(alone), *cells))
    quiet = result["fault_free"]
    rows.append(("nothing", "", "", f"{quiet['gap_median_s']:.1f}", f"{quiet['gap_max_s']:.1f}", "", ""))
    return table(head, rows)
