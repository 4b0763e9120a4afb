"""How many drafters a verifier pays for, and what pods deliver under growing load, with failures and without: in simulated time.

    python -m benchmarks.simulator COSTS_OR_CONFIG --out DIR [--pods 1,8,64] [--drafters 0,0.0625,0.125,0.25,0.5,1,2,4]
        [--rate 0.5,0.8,0.9,1,1.2] [--seconds 60] [--prompt-tokens 512] [--answer-tokens 256] [--spread 0.5] [--per-verifier 1]
        [--budget N|auto] [--failures 1,1] [--recovery 10,13] [--seed 0]
    python -m benchmarks.simulator check CONFIG ...     see check.py

COSTS_OR_CONFIG is a JSON file that `check` has written (measured costs), or a Serve config file that names its GPUs (computed
ones). Drafters are asked for under streams that ask anew when they are answered: one a pod, a quarter of its batch, all of it and
a queue. Pods are asked for under requests that come at random, `--rate` in parts of what the pods can answer at most. Smaller
deployments run several times, so that all see as many pod-seconds. Writes simulator-NAME.json, .md and .png.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from ddtree.deployments.requests import Budget

from ..run import numbers
from . import check, paper, report
from .figures import Summary, summary
from .load import Lengths, Load, Poisson, Streams
from .processes import Failures
from .profile import Profile
from .simulation import Deployment, MakeLoad, simulate

SHARING = 16  # pods whose drafters are asked for, so that one may serve up to as many
QUEUED = 1.25  # streams by places in the batches, where these are to be full
WARM_UP = 0.25  # of the time, before anything counts
FIELDS = (
    "pods", "drafters", "rate", "seconds", "prompt_tokens", "answer_tokens", "spread", "per_verifier", "failures", "recovery",
    "seed",
)  # fmt: skip


def main() -> int:
    if sys.argv[1:2] == ["check"]:
        return check.main(sys.argv[2:])
    options = _options()
    profile = Profile.read(options.source) if options.source.suffix == ".json" else paper.profile(options.source)
    if options.budget is not None:
        profile = replace(profile, budget=options.budget)
    options.out.mkdir(parents=True, exist_ok=True)
    sweep = Sweep(profile, options)
    result: dict[str, Any] = {
        "name": options.name or profile.name,
        "source": profile.source,
        "command": shlex.join(["python", "-m", str(__package__), *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": {name: getattr(options, name) for name in FIELDS} | {"budget": profile.budget},
        "limits": asdict(profile.limits),
        "drafters": sweep.drafters(),
        "pods": sweep.pods(),
    }
    report.write(result, options.out)
    print(report.markdown(result))
    return 0


class Sweep:
    """Over drafters, then over pods."""

    def __init__(self, profile: Profile, options: argparse.Namespace) -> None:
        self._profile, self._options = profile, options
        self._lengths = Lengths(options.prompt_tokens, options.answer_tokens, options.spread)

    def drafters(self) -> list[dict[str, Any]]:
        """A point for each number of streams and of drafters per verifier."""
        batch = self._profile.limits.max_sequences
        points = [(n, d) for n in sorted({1, max(1, batch // 4), int(QUEUED * batch)}) for d in self._options.drafters]
        found = []
        for streams, each in track(points, "drafters"):
            deployment = Deployment(SHARING, round(each * SHARING))
            figures = self._run(deployment, self._closed(streams * SHARING))
            found.append({"pods": SHARING, "streams": streams, "per_verifier": each} | asdict(figures))
        return found

    def pods(self) -> list[dict[str, Any]]:
        """A point for each number of pods, arrival rate, and with failures or without."""
        options = self._options
        failures = [Failures(*of) for of in zip(options.failures, options.recovery, strict=True)]
        most = self._run(
            self._deployment(1), self._closed(int(QUEUED * self._profile.limits.max_sequences))
        ).requests_per_s
        points = [(pods, part, faults) for pods in options.pods for part in options.rate for faults in (False, True)]
        found = []
        for pods, part, faults in track(points, "pods"):
            deployment = self._deployment(pods)
            if faults:
                deployment = replace(deployment, drafter_failures=failures[0], verifier_failures=failures[1])
            rate = part * most * pods
            figures = self._run(deployment, self._open(rate), runs=max(1, max(options.pods) // pods))
            found.append({"pods": pods, "part": part, "rate": rate, "failures": faults} | asdict(figures))
        return found

    def _deployment(self, pods: int) -> Deployment:
        return Deployment(pods, max(1, round(self._options.per_verifier * pods)))

    def _run(self, deployment: Deployment, load: MakeLoad, runs: int = 1) -> Summary:
        end = self._options.seconds
        seeds = np.random.SeedSequence(self._options.seed).generate_state(runs).tolist()
        figures = [simulate(self._profile, deployment, load, begin=WARM_UP * end, end=end, seed=seed) for seed in seeds]
        return summary(figures, deployment.pods, deployment.drafters)

    def _closed(self, streams: int) -> MakeLoad:
        def load(random: np.random.Generator) -> Load:
            return Streams(self._lengths.draw(random), streams, self._options.seconds)

        return load

    def _open(self, rate: float) -> MakeLoad:
        def load(random: np.random.Generator) -> Load:
            lengths, times = random.spawn(2)
            return Poisson(self._lengths.draw(lengths), rate, self._options.seconds, times)

        return load


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="COSTS_OR_CONFIG")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", help="of the result; the configuration's by default")
    parser.add_argument("--pods", type=numbers, default=[1, 8, 64])
    parser.add_argument(
        "--drafters", type=_parts, default=[0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4], help="per verifier"
    )
    parser.add_argument(
        "--rate", type=_parts, default=[0.5, 0.8, 0.9, 1.0, 1.2], help="1: as many as the pods can answer"
    )
    parser.add_argument("--seconds", type=float, default=60, help="simulated, a quarter of them before anything counts")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="mean")
    parser.add_argument("--answer-tokens", type=int, default=256, help="mean")
    parser.add_argument("--spread", type=float, default=0.5, help="standard deviation of both, as a part of the mean")
    parser.add_argument("--per-verifier", type=float, default=1, help="drafters, where pods are asked for")
    parser.add_argument("--budget", type=_budget, help="instead of the configuration's")
    parser.add_argument("--failures", type=_parts, default=[1, 1], help="an hour, of each drafter and of each verifier")
    parser.add_argument("--recovery", type=_parts, default=[10, 13], help="seconds, of a drafter and of a verifier")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _parts(text: str) -> Sequence[float]:
    return [float(part) for part in text.split(",")]


def _budget(text: str) -> Budget:
    return "auto" if text == "auto" else int(text)


if __name__ == "__main__":
    sys.exit(main())
