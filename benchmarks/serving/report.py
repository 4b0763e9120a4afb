"""What a run found, as JSON and as a Markdown table, written anew whenever there is more. Measures nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddtree.deployments.requests import STAGES

from ..run import save, table, where

MODES = ("plain", "speculative")
STAGE_HEAD = ("streams", "ms of a round", *STAGES, "rest")


def write(result: dict[str, Any], folder: Path) -> None:
    """Write serving-NAME.json and serving-NAME.md."""
    save(folder / f"serving-{result['name']}", result, markdown(result))


def markdown(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [f"{result['model']} on {where(result)}, {result['date']}. {versions}.", "", f"`{result['command']}`", ""]
    if result["synthetic_drafter"]:
        told = ", ".join(f"{key} {value}" for key, value in result["synthetic_drafter"].items())
        lines += [f"**Synthetic drafter ({told}): the speculative figures are no drafter's.**", ""]
    sections = (_speed, _peers, _stages, _long_prompt)
    for section in sections:
        if table := section(result):
            lines += [*table, ""]
    return "\n".join(lines + [f"- {remark}" for remark in result["remarks"]]) + "\n"


def _speed(result: dict[str, Any]) -> list[str]:
    head = ("streams", "plain tokens/s", "speculative tokens/s", "speed-up", "tokens per round", "identical outputs")
    return _table(head, [speed_cells(run) for run in result["runs"]])


def speed_cells(run: dict[str, Any]) -> tuple[Any, ...]:
    """Of a result of `run_bench`: streams, tokens/s plain and speculative, speed-up, tokens a round, share of same outputs."""
    return (
        run["settings"]["concurrency"],
        f"{run['plain_tokens_per_s']:.1f}",
        f"{run['speculative_tokens_per_s']:.1f}",
        f"{run['speedup']:.2f}",
        f"{run['acceptance_length']:.2f}",
        f"{run['identical']:.1%}",
    )


def _peers(result: dict[str, Any]) -> list[str]:
    ours = {run["settings"]["concurrency"]: run for run in result["runs"]}
    rows = []
    for name, peer in result["peers"].items():
        for concurrency, run in peer["runs"].items():
            speed, beside = run["tokens_per_s"], ours.get(int(concurrency))
            ratios = [f"{beside[f'{mode}_tokens_per_s'] / speed:.2f}" if beside else "–" for mode in MODES]
            same = "–" if run["identical_to_plain"] is None else f"{run['identical_to_plain']:.1%}"
            rows.append((f"{name}, {peer['setting']}", concurrency, f"{speed:.1f}", *ratios, same))
        rows += [(f"{name}, {setting}", "–", "did not run", "–", "–", "–") for setting in peer["failures"]]
    head = ("engine", "streams", "tokens/s", "our plain / it", "our speculative / it", "same output as our plain")
    return _table(head, rows)


def _stages(result: dict[str, Any]) -> list[str]:
    return _table(STAGE_HEAD, [cells for run in result["runs"] for cells in stage_cells(run)])


def stage_cells(run: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Of a result of `run_bench`, a row for each mode, under STAGE_HEAD."""
    rows = []
    for mode in MODES:
        stages = [f"{run['stage_ms_per_round'][mode][stage]:.2f}" for stage in STAGES]
        rest = f"{run['rest_ms_per_round'][mode]:.2f}"
        rows.append((run["settings"]["concurrency"], mode, *stages, rest))
    return rows


def _long_prompt(result: dict[str, Any]) -> list[str]:
    found = result["long_prompt"]
    if not found:
        return []
    title = f"{found['prompt_tokens']} tokens beside {found['streams']} streams"
    head = (title, "before: p50, ms", "p99", "meanwhile: p50", "p99", "p99 / p99", "prompt, s")
    rows = []
    for mode in MODES:
        figures = found[mode]
        cells = [figures[when][which] for when in ("before", "meanwhile") for which in ("p50_ms", "p99_ms")]
        cells += [figures["p99_ratio"], figures["prompt_seconds"]]
        rows.append((mode, *(f"{cell:.2f}" for cell in cells)))
    return _table(head, rows)


def _table(head: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> list[str]:
    if not rows:
        return []
    return table(head, rows)
