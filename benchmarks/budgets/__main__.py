"""Budgets fixed and automatic, at each concurrency and context, in one service: tokens per second in windows that take turns.

    python -m benchmarks.budgets CONFIG --prompts FILE.jsonl --out DIR [--concurrency 1,2,4,8,16,32,64]
        [--budgets 0,4,8,16,32,63,auto] [--contexts 0,4000] [--turns 2] [--seconds 10] [--temperature 0] [--mps]

So many clients each send one request after another. A window begins when its mode has run for a while, and its tokens are those
that the router counts (`vllm:generation_tokens`) until it ends; what runs then is cut off. Modes take turns, so that a machine
whose speed drifts is as fast for all, and begin with the same prompt in each turn. A context is so many tokens that all prompts
begin with, computed once: they are read by every step. Writes budgets-NAME.json, .md and .png, anew after every window.
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import Progress

from ddtree.deployments.commands.prompts import read_prompts
from ddtree.deployments.config import load
from ddtree.deployments.requests import Budget

from ..run import head, numbers
from ..serving.mps import multi_process_service
from ..serving.service import serving
from . import report
from .windows import Load, Window

FIELDS = ("concurrency", "budgets", "contexts", "turns", "seconds", "temperature", "mps")


def main() -> None:
    options = _options()
    prompts = read_prompts(options.prompts)
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        **head(options.config.stem, __package__),
        "config": load(options.config).model_dump(mode="json"),
        "settings": {name: getattr(options, name) for name in FIELDS} | {"prompts": len(prompts)},
        "windows": [],
    }
    points = [(context, streams) for context in options.contexts for streams in options.concurrency]
    with (
        multi_process_service() if options.mps else contextlib.nullcontext(),
        serving(options.config, options.out / "service.log", drafting=True) as url,
        Progress() as progress,
    ):
        task = progress.add_task("windows", total=len(points) * options.turns * len(options.budgets))
        for context, streams in points:
            clients = Load(url, prompts, context, streams, options.temperature)
            for turn in range(options.turns):
                for budget in options.budgets if turn % 2 == 0 else reversed(options.budgets):
                    window: Window = clients.run(budget, options.seconds, turn * len(prompts) // options.turns)
                    result["windows"].append(asdict(window))
                    report.write(result, options.out)
                    progress.update(task, advance=1, description=f"context {context}, {streams} streams, {budget}")
    print(report.markdown(result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with prompt, question or turns on each line")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--concurrency", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--budgets", type=budgets, default=[0, 4, 8, 16, 32, 63, "auto"])
    parser.add_argument("--contexts", type=numbers, default=[0, 4000], help="tokens")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10, help="of a window")
    parser.add_argument("--temperature", type=float, default=0)
    parser.add_argument("--mps", action="store_true", help="under NVIDIA's Multi-Process Service, started for the run")
    return parser.parse_args()


def budgets(text: str) -> list[Budget]:
    return ["auto" if part == "auto" else int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
