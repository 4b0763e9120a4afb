"""What an elastic run found, as JSON and as a Markdown table. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..run import save, table, where


def write(result: dict[str, Any], folder: Path) -> None:
    """Write elastic-NAME.json and elastic-NAME.md."""
    save(folder / f"elastic-{result['name']}", result, markdown(result))


def markdown(result: dict[str, Any]) -> str:
    settings = result["settings"]
    lines = [f"{result['model']} on {where(result)}, {result['date']}.", "", f"`{result['command']}`", ""]
    if load := result["load"]:
        lines += [
            f"{len(result['phases'])} of {len(settings['drafters'])} phases, {settings['streams']} streams at a time, "
            f"{load['streams']} in all, {load['tokens']} tokens in {load['seconds']:.0f} s: **{outcome(load)}**, "
            f"{load['cut']} cut off.",
            "",
            *_phases(result),
            "",
        ]
        lines += [f"- failed: {error}" for error in load["failed"]]
        lines += [
            f"- changed from token {one['first_difference']} on, temperature {one['temperature']}: {one['prompt']!r}"
            for one in load["changed"] or ()
        ]
    lines += [
        f"- the {phase['drafters']} drafters of {phase['reached_s']:.0f} s to {phase['ended_s']:.0f} s did not all stay"
        for phase in result["phases"]
        if not phase["held"]
    ]
    return "\n".join(lines + [f"- {remark}" for remark in result["remarks"]]) + "\n"


def outcome(load: dict[str, Any]) -> str:
    """What clients noticed, in words."""
    failed = f"{len(load['failed'])} failed"
    if load["changed"] is not None:
        return f"{failed}, {len(load['changed'])} changed"
    return f"{failed}, {load['identical'] or 0:.1%} as in the reference"


def _phases(result: dict[str, Any]) -> list[str]:
    """A row for each, and one for the reference."""
    head = (
        "drafters", "asked for, s", "there after, s", "tokens/s until then", "tokens/s", "tokens a round",
        "a stream got nothing, s: max", "moves", "rows again", "fallbacks",
    )  # fmt: skip
    rows: list[Iterable[Any]] = [
        (
            phase["drafters"],
            f"{phase['asked_s']:.1f}",
            f"{phase['reached_s'] - phase['asked_s']:.1f}",
            _tenth(phase["changing_tokens_per_s"]),
            _tenth(phase["tokens_per_s"]),
            _tenth(phase["generated_tokens"] / phase["rounds"] if phase["rounds"] else None),
            f"{phase['still_s']:.1f}",
            phase["moves"],
            phase["moved_rows"],
            phase["fallbacks"],
        )
        for phase in result["phases"]
    ]
    quiet = result["reference"]
    speed = _tenth(quiet["tokens"] / quiet["seconds"])
    rows.append(("reference", "", "", "", speed, "", f"{quiet['gap_max_s']:.1f}", "", "", ""))
    return table(head, rows)


def _tenth(number: float | None) -> str:
    return "–" if number is None else f"{number:.1f}"
