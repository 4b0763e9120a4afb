"""The simulator against the real service: measure some loads, predict others, which are measured in the same run.

    python -m benchmarks.simulator check CONFIG --prompts FILE.jsonl --out DIR [--concurrency 1,4] [--held-out 2,8]
        [--budgets 0,4,16] [--held-out-budgets 0,8] [--max-tokens 24] [--turns 5]

The same prompts are sent at every load, by so many streams that each ask anew when they are answered, and all answers are of the
same length. Loads that are known and held out alternate, in every other turn backwards, and of a load's turns the one counts that
took the median time: the machine may be busy with other things for a while, and its speed may drift.
Rounds do not overlap (`scheduler.overlap: off`), as they do not in the simulator. Writes simulator-check-NAME.json and .md, and
simulator-costs-NAME.json, from which the simulator can go on. Exits with 1 where a prediction is off by more than 15 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from ddtree.deployments.commands.prompts import read_prompts
from ddtree.deployments.config import load, read_document

from ..run import head, numbers, save, where
from ..serving.service import serving
from . import fit
from .load import Streams
from .measure import Measured, Point, run
from .profile import Limits, Profile
from .simulation import Deployment, simulate

CLOSE = 0.15  # so far a prediction may be off
SEEDS = 32  # runs whose mean is the prediction
WARM_UP = 2  # requests of each stream
FIELDS = ("concurrency", "held_out", "budgets", "held_out_budgets", "max_tokens", "turns")


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    prompts = read_prompts(options.prompts)
    options.out.mkdir(parents=True, exist_ok=True)
    known = [Point(*point) for point in product(options.concurrency, options.budgets)]
    held_out = [Point(*point) for point in product(options.held_out, options.held_out_budgets)]
    points = sorted({*known, *held_out}, key=lambda point: (point.budget, point.streams))
    with serving(_without_overlap(options.config, options.out), options.out / "service.log", drafting=True) as url:
        for point in known:
            run(url, prompts[: WARM_UP * point.streams], 8, point)
        measured = []
        for turn in range(options.turns):
            for point in points if turn % 2 == 0 else reversed(points):
                measured.append(run(url, prompts, options.max_tokens, point))
                print(f"{point.streams} streams, budget {point.budget}: {measured[-1].seconds:.1f} s", flush=True)
    middle = [typical([run for run in measured if _point(run) == point]) for point in points]
    begun = head(options.config.stem, __package__, ["check", *arguments])
    found = calibrate(options.config, where(begun), [one for one in middle if _point(one) in known])
    found.write(options.out / f"simulator-costs-{options.config.stem}.json")
    result: dict[str, Any] = {
        **begun,
        "settings": {name: getattr(options, name) for name in FIELDS} | {"prompts": len(prompts)},
        "measured": [asdict(one) for one in measured],
        "points": [compare(found, one) | {"held_out": _point(one) in held_out} for one in middle],
    }
    save(options.out / f"simulator-check-{options.config.stem}", result, markdown(result))
    print(markdown(result))
    return 0 if all(abs(one["ratio"] - 1) <= CLOSE for one in result["points"] if one["held_out"]) else 1


def calibrate(config: Path, machine: str, measured: Sequence[Measured]) -> Profile:
    """What a service of this configuration costs, by these runs."""
    given = load(config)
    scheduler = given.scheduler
    return Profile(
        name=config.stem,
        source=f"measured on {machine}, {datetime.now(UTC):%Y-%m-%d}: {config.name}, sums of runs at "
        f"{', '.join(map(str, sorted({m.streams for m in measured})))} streams and budgets "
        f"{', '.join(map(str, sorted({m.budget for m in measured})))}",
        costs=fit.costs(measured),
        acceptance=fit.acceptance(measured),
        limits=Limits(
            max_sequences=scheduler.max_sequences,
            max_waiting=scheduler.max_waiting,
            prefill_rows=scheduler.prefill_rows,
            rebuild_window=given.drafter.rebuild_window,
            horizon=max(len(m.accepted) for m in measured) - 1,
            max_budget=given.tree.max_budget,
            kv_tokens=given.verifier.kv_tokens,
        ),
        budget=given.tree.budget,
    )


def typical(runs: Sequence[Measured]) -> Measured:
    """That of a load's runs that took the median time."""
    return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]


def compare(profile: Profile, measured: Measured) -> dict[str, Any]:
    """Tokens per second: predicted, measured, and the ratio."""
    fixed = replace(profile, budget=measured.budget)

    def seconds(seed: int) -> float:
        return simulate(
            fixed, Deployment(), lambda random: Streams(measured.requests, measured.streams), seed=seed
        ).last

    predicted = measured.tokens * SEEDS / sum(seconds(seed) for seed in range(SEEDS))
    really = measured.tokens / measured.seconds
    return asdict(_point(measured)) | {"predicted": predicted, "measured": really, "ratio": predicted / really}


def markdown(result: dict[str, Any]) -> str:
    """A line for each load; those that nothing was learned from are the check."""
    lines = [
        f"`{result['command']}`, {result['date'][:10]}, {result['machine']['cpu']}, {result['machine']['cores']} cores; tokens/s",
        "",
        "| streams | budget | known before | predicted | measured | predicted / measured |",
        "|---|---|---|---|---|---|",
    ]
    for one in result["points"]:
        known = "no" if one["held_out"] else "yes"
        cells = (one["streams"], one["budget"], known, *(f"{one[key]:.1f}" for key in ("predicted", "measured")))
        lines.append("| " + " | ".join(map(str, cells)) + f" | {one['ratio']:.2f} |")
    held_out = [one["ratio"] for one in result["points"] if one["held_out"]]
    worst = max(held_out, key=lambda ratio: abs(ratio - 1))
    lines += [
        "",
        f"Held out: {len(held_out)} loads, at worst {worst:.2f} times what was measured (allowed: {CLOSE:.0%} off).",
    ]
    return "\n".join(lines) + "\n"


def _point(measured: Measured) -> Point:
    return Point(measured.streams, measured.budget)


def _without_overlap(config: Path, folder: Path) -> Path:
    document = read_document(config)
    document["applications"][0]["args"].setdefault("scheduler", {})["overlap"] = "off"
    path = folder / config.name
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return path


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__} check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with prompt, question or turns on each line")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--concurrency", type=numbers, default=[1, 4], help="streams of the loads that are learned from"
    )
    parser.add_argument("--held-out", type=numbers, default=[2, 8], help="streams of those that are predicted")
    parser.add_argument("--budgets", type=numbers, default=[0, 4, 16], help="of the former")
    parser.add_argument("--held-out-budgets", type=numbers, default=[0, 8], help="of the latter")
    parser.add_argument("--max-tokens", type=int, default=24, help="of every answer")
    parser.add_argument("--turns", type=int, default=5)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
