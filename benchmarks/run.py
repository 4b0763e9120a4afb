"""What runs of benchmarks have in common: what they are told, how they say what they were, and how a result is written.

Measures nothing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddtree.deployments.commands.machine import Machine
from ddtree.deployments.commands.prompts import read_prompts
from ddtree.deployments.config import AppConfig, load
from ddtree.deployments.models import Models, find


def read(options: argparse.Namespace, first: int | None = None) -> tuple[list[str], AppConfig, Models]:
    """The `first` prompts, the configuration and its models that options `prompts` and `config` name. Ends the program, with what
    to do, where they are of no use."""
    try:
        config = load(options.config)
        return read_prompts(options.prompts, first), config, find(without_synthetic(config))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def without_synthetic(config: AppConfig) -> AppConfig:
    """The configuration without the synthetic drafter, whose recording a benchmark makes itself."""
    return config.model_copy(update={"drafter": config.drafter.model_copy(update={"synthetic": None})})


class CutShort(Exception):
    """The time is over, or somebody ended the run."""


@contextmanager
def limited(seconds: float) -> Generator[None, None, None]:
    """For so long, or without end for 0. Raises CutShort in the block when the time is over, and when the process is to end."""

    def cut(number: int, _: object) -> None:
        raise CutShort(f"ended by {signal.Signals(number).name}")

    for ending in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(ending, cut)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def head(name: str, package: str | None, arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """What a result begins with. `package` was run, with these arguments (None: those of the command line)."""
    given = sys.argv[1:] if arguments is None else arguments
    return {
        "name": name,
        "command": shlex.join(["python", "-m", str(package), *given]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(Machine.read()),
    }


def where(result: dict[str, Any]) -> str:
    """The machine of a result, in words."""
    machine = result["machine"]
    return ", ".join(machine["gpus"]) or f"{machine['cpu']}, {machine['cores']} cores"


def save(stem: Path, result: dict[str, Any], text: str) -> None:
    """Write STEM.json and STEM.md; a stem may have dots in it."""
    found = json.dumps(result, indent=1, ensure_ascii=False)
    stem.with_name(f"{stem.name}.json").write_text(found + "\n", encoding="utf-8")
    stem.with_name(f"{stem.name}.md").write_text(text, encoding="utf-8")


def table(header: Iterable[Any], rows: Iterable[Iterable[Any]]) -> list[str]:
    """Lines of Markdown."""
    header = list(header)
    return ["| " + " | ".join(map(str, line)) + " |" for line in (header, ["---"] * len(header), *rows)]


def numbers(text: str) -> list[int]:
    """An argument such as 1,8,32."""
    return [int(part) for part in text.split(",")]
