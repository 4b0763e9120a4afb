"""What a round takes beside what it computes: its wall time less what the drafter's and the verifier's devices computed in it.

    python -m benchmarks.overhead CONFIG --out DIR [--streams 1,16] [--transports mailbox,objects] [--temperature 0] [--mps]

Run it in the repository, on the machine that is to be measured. A router, a verifier's rank and a drafter, each an actor of its
own, without Serve and HTTP; streams that all decode from the beginning to the end of a window, in rounds that do not overlap. At
the end the drafter is killed, and requests that ask for drafts are timed beside those that ask for none. Writes
overhead-NAME.json and overhead-NAME.md.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from ddtree.deployments import models
from ddtree.deployments.config import AppConfig

from .. import pod as pods
from ..run import head, numbers, read, save, table, where
from ..serving.mps import multi_process_service
from .windows import Prompts, Window, measure


def main() -> int:
    options = _options()
    prompts, config, found = read(options)
    if found.drafter is None:
        sys.exit(f"error: {options.config} has no drafter, and what a draft costs is to be measured")
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        **head(options.config.stem, __package__),
        "model": found.served_name,
        "settings": {name: getattr(options, name) for name in ("budget", "temperature", "seconds", "mps")},
        "rounds": [],
        "without_drafters": [],
    }
    with multi_process_service() if options.mps else contextlib.nullcontext():
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
        try:
            for transport in options.transports:
                _pod(
                    options,
                    config.model_copy(update={"transport": transport}),
                    found,
                    Prompts(found, prompts, options.temperature),
                    result,
                )
                save(options.out / f"overhead-{result['name']}", result, markdown(result))
        finally:
            ray.shutdown()
    print(markdown(result))
    return 0


def _pod(
    options: argparse.Namespace, config: AppConfig, found: models.Models, prompts: Prompts, result: dict[str, Any]
) -> None:
    """Every window with one transport."""

    def window(streams: int, budget: int) -> dict[str, Any]:
        print(f"{config.transport}, {streams} streams, budget {budget}", file=sys.stderr, flush=True)
        return {"transport": config.transport, **asdict(measure(pod, prompts, streams, budget, options.seconds))}

    pod = pods.start(pods.overlapping(config, "off"), found)
    try:
        pod.add_drafter()
        for streams in options.streams:
            result["rounds"] += [window(streams, budget) for budget in (0, options.budget)]
        pod.kill_drafters()
        for streams in options.streams:
            result["without_drafters"] += [
                window(streams, budget) for _ in range(options.turns) for budget in (0, options.budget)
            ]
    finally:
        pod.end()


def markdown(result: dict[str, Any]) -> str:
    lines = [f"{result['model']} on {where(result)}, {result['date']}.", "", f"`{result['command']}`", ""]
    rows: list[tuple[Any, ...]] = []
    for row in result["rounds"]:
        window = Window(**{key: value for key, value in row.items() if key != "transport"})
        cells = [window.round_ms, window.draft_ms, window.verify_ms, window.overhead_ms, window.tokens / window.rounds]
        figures = [f"{cell:.2f}" for cell in cells]
        speed = f"{window.tokens / window.seconds:.1f}"
        rows.append((row["transport"], window.streams, window.budget, *figures, speed))
    header = (
        "transport",
        "streams",
        "budget",
        "round, ms",
        "draft",
        "verify",
        "overhead",
        "tokens a round",
        "tokens/s",
    )
    lines += table(header, rows)
    speeds: dict[tuple[str, int], dict[bool, float]] = {}
    for row in result["without_drafters"]:
        sums = speeds.setdefault((row["transport"], row["streams"]), {False: 0.0, True: 0.0})
        sums[row["budget"] > 0] += row["tokens"] / row["seconds"]
    if speeds:
        ratios = [(*point, f"{sums[True] / sums[False]:.3f}") for point, sums in speeds.items()]
        lines += ["", *table(("transport", "streams", "all drafters dead / plain, tokens/s"), ratios)]
    return "\n".join(lines) + "\n"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, default=Path("tests/data/prompts.jsonl"))
    parser.add_argument("--streams", type=numbers, default=[1, 16])
    parser.add_argument("--transports", type=lambda text: tuple(text.split(",")), default=("mailbox", "objects"))
    parser.add_argument("--budget", type=int, default=31, help="nodes of a tree besides its root")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--turns", type=int, default=2, help="of windows without drafters; 0: none")
    parser.add_argument("--seconds", type=float, default=3.0, help="of a window")
    parser.add_argument("--mps", action="store_true", help="under NVIDIA's Multi-Process Service, started for the run")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
