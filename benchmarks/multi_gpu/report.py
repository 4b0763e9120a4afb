"""What a run of several layouts found, as JSON and as Markdown tables, written anew whenever there is more. Measures nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..overhead.windows import Window
from ..run import save, table, where
from ..serving.report import STAGE_HEAD, speed_cells, stage_cells


def write(result: dict[str, Any], folder: Path) -> None:
    """Write multi-gpu-NAME.json and multi-gpu-NAME.md."""
    save(folder / f"multi-gpu-{result['name']}", result, markdown(result))


def markdown(result: dict[str, Any]) -> str:
    lines = [f"{result['model']} on {where(result)}, {result['date']}.", "", f"`{result['command']}`", ""]
    lines += [
        "A layout is the verifier's ranks; +own: drafters have GPUs of their own, and do not share the verifier's first one.",
        "",
    ]
    for section in (_gpus, _rounds, _speed, _stages, _changes, _kills):
        if shown := section(result):
            lines += [*shown, ""]
    return "\n".join(lines + [f"- {remark}" for remark in result["remarks"]]) + "\n"


def _gpus(result: dict[str, Any]) -> list[str]:
    found = result["gpus"]
    if not found or not found["pairs"]:
        return []
    header = ("GPU", "to GPU", "reaches its memory", "copy, GB/s", "both ways at a time, GB/s", "4 KiB, µs")
    rows = [
        (
            pair["from"], pair["to"], "yes" if pair["reaches"] else "no",
            *(f"{pair[name]:.0f}" for name in ("gb_per_s", "both_gb_per_s", "small_us")),
        )
        for pair in found["pairs"]
    ]  # fmt: skip
    return table(header, rows)


def _rounds(result: dict[str, Any]) -> list[str]:
    rows = []
    for layout, found in result["layouts"].items():
        for row in found["rounds"]:
            window = Window(**{key: value for key, value in row.items() if key not in ("transport", "overlap")})
            # Where rounds overlap, devices compute at the same time: a difference says nothing there.
            says = row["overlap"] == "off"
            overhead = (
                [f"{window.overhead_ms:.2f}", f"{window.overhead_ms / window.round_ms:.1%}"] if says else ["–", "–"]
            )
            times = [f"{ms:.2f}" for ms in (window.round_ms, window.draft_ms, window.verify_ms)]
            what = layout, row["transport"], row["overlap"], window.streams, window.budget
            rows.append((*what, *times, *overhead, f"{window.tokens / window.seconds:.0f}"))
    header = (
        "layout", "transport", "rounds overlap", "streams", "budget", "round, ms", "draft", "verify", "overhead", "share",
        "tokens/s",
    )  # fmt: skip
    return table(header, rows) if rows else []


def _speed(result: dict[str, Any]) -> list[str]:
    runs = _runs(result)
    rows = [(layout, *speed_cells(run), f"{run['plain_as_reference']:.1%}") for layout, run in runs]
    header = (
        "layout", "streams", "plain tokens/s", "speculative", "speed-up", "tokens a round", "speculative = plain",
        "plain = the first layout's",
    )  # fmt: skip
    synthetic = any(run["synthetic_drafter"] for _, run in runs)
    said = ["**Synthetic drafter: the speculative figures are no drafter's.**", ""] if synthetic else []
    return [*said, *table(header, rows)] if rows else []


def _stages(result: dict[str, Any]) -> list[str]:
    rows = [(layout, *cells) for layout, run in _runs(result) for cells in stage_cells(run)]
    return table(("layout", *STAGE_HEAD), rows) if rows else []


def _runs(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Every run of the service, with its layout."""
    return [(layout, run) for layout, found in result["layouts"].items() for run in found["service"].get("runs", ())]


def _changes(result: dict[str, Any]) -> list[str]:
    rows = [
        (
            layout, phase["drafters"], f"{phase['reached_s'] - phase['asked_s']:.1f}", _of(phase["changing_tokens_per_s"]),
            _of(phase["tokens_per_s"]), f"{phase['still_s']:.1f}",
        )
        for layout, changes in _changed(result)
        for phase in changes["phases"]
    ]  # fmt: skip
    header = ("layout", "drafters", "there after, s", "tokens/s until then", "tokens/s", "a stream got nothing, s: max")
    lines = table(header, rows) if rows else []
    for layout, changes in _changed(result):
        load = changes["load"]
        lines += [
            "",
            f"Layout {layout}: {load['streams']} streams with all changes, {len(load['failed'])} failed, "
            f"{load['streams'] - len(load['changed']) - len(load['failed'])} with the tokens that they had undisturbed.",
        ]
    return lines


def _kills(result: dict[str, Any]) -> list[str]:
    rows = [
        (layout, kill["kind"], _of(kill["recovered_s"]), f"{kill['still_s']:.1f}")
        for layout, changes in _changed(result)
        for kill in changes["kills"]
    ]
    return table(("layout", "killed", "replaced after, s", "a stream got nothing, s: max"), rows) if rows else []


def _changed(result: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    all_changes = ((layout, found["service"].get("changes")) for layout, found in result["layouts"].items())
    return [(layout, changes) for layout, changes in all_changes if changes and "load" in changes]


def _of(number: float | None) -> str:
    return "–" if number is None else f"{number:.1f}"
