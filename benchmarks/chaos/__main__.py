"""Serves a configuration, records what it answers, then asks again while random processes of it are killed with `kill -9`.

    python -m benchmarks.chaos CONFIG --streams 200 --kills 20 --out DIR [--seed N] [--limit SECONDS]

Run it in the repository, on Linux. The target must be in float32: there an answer does not depend on what it was computed
beside. Every kind of process is killed about as often as any other, except the ingress and Ray's own. Writes chaos-NAME.json,
.md and .png and the service's output; the exit status is 1 where a stream failed or changed, something leaked or the run was cut
short.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from ddtree.deployments.commands.client import ServerError

from ..run import CutShort, head, read
from ..serving.service import Failed, serving
from . import plot, report
from .findings import compare, leaks, per_kill, speed
from .monkey import Monkey, NotRecovered
from .streams import Ask, Crowd, Stream

PROMPTS = Path("tests/data/prompts.jsonl")
SAY_S = 5.0
DRAFTLESS = 5  # every so many-th request is decoded without drafts


def main() -> int:
    options = _options()
    prompts, config, found = read(options)
    if config.target.dtype != "float32":
        sys.exit(
            f"error: {options.config} has target.dtype {config.target.dtype}; answers are compared in float32 only"
        )
    if config.drafter.checkpoint is None:
        sys.exit(f"error: {options.config} has no drafter, and some of the processes to kill are drafters")
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options, prompts, found.served_name)
    run.everything()
    print(report.markdown(run.result))
    return 0 if run.result["passed"] else 1


class Run:
    """The fault-free part, the chaos and what is left after it. `result` is JSON values throughout."""

    def __init__(self, options: argparse.Namespace, prompts: list[str], model: str) -> None:
        self._options, self._begin = options, time.monotonic()
        self._asks = [
            Ask(prompt, options.max_tokens, temperature, seed, 0 if (2 * i + seed) % DRAFTLESS == 0 else None)
            for i, prompt in enumerate(prompts)
            for seed, temperature in enumerate((0.0, 0.8))
        ][: options.streams]
        self.result: dict[str, Any] = {
            **head(options.config.stem, __package__),
            "model": model,
            "settings": {
                "streams": options.streams, "clients": options.clients, "max_tokens": options.max_tokens,
                "kills": options.kills, "seed": options.seed, "overlap": options.overlap,
            },
            "fault_free": {}, "chaos": {}, "kills": [], "leaks": [], "remarks": [], "passed": False,
        }  # fmt: skip

    def everything(self) -> None:
        """Whatever ends it is a remark; what was found until then is written."""
        try:
            with serving(self._options.config, self._options.out / "service.log", drafting=True) as url:
                monkey = Monkey(url, os.getpid(), self._options.seed)
                self._say(f"the service is up: {monkey.whole}")
                expected = self._fault_free(url)
                self._chaos(url, monkey, expected)
        except (CutShort, Failed, NotRecovered, ServerError) as error:
            self.result["remarks"].append(f"{type(error).__name__}: {error}")
        chaos, found = self.result["chaos"], self.result
        clean = bool(chaos) and not (chaos["failed"] or chaos["changed"] or found["leaks"] or found["remarks"])
        found["passed"] = clean and len(found["kills"]) == self._options.kills
        report.write(found, self._options.out)
        plot.draw(found, self._options.out)

    def _fault_free(self, url: str) -> dict[Ask, Stream]:
        """What each request is answered when nothing happens."""
        begin = time.monotonic()
        with Crowd(url, self._asks, self._options.clients) as crowd:
            self._watch(lambda: not crowd.running, lambda: self._progress(crowd, 0))
        if failed := [stream.error for stream in crowd.streams if stream.error]:
            raise Failed(
                f"without any fault {len(failed)} streams failed: {failed[0]}", self._options.out / "service.log"
            )
        self.result["fault_free"] = speed(crowd.streams, begin)
        return {stream.ask: stream for stream in crowd.streams}

    def _chaos(self, url: str, monkey: Monkey, expected: dict[Ask, Stream]) -> None:
        """At least as many streams as asked for, and as many as the kills take."""
        options, begin = self._options, time.monotonic()
        asks = [self._asks[i % len(self._asks)] for i in range(options.streams)]
        crowd = Crowd(url, asks, options.clients, more=lambda: len(monkey.kills) < options.kills)
        try:
            with crowd:
                for kind in islice(monkey.turns(), options.kills):
                    self._check_time()
                    kill = monkey.strike(kind)
                    self._progress(crowd, len(monkey.kills), f"killed {kind} {kill.pid}")
                    if not monkey.chance(options.overlap):
                        monkey.recover(crowd.moving_since)
                    monkey.pause(options.pause)
                monkey.recover()
                self._watch(lambda: not crowd.running, lambda: self._progress(crowd, len(monkey.kills)))
            self.result["leaks"] = leaks(monkey)
        finally:
            streams = list(crowd.streams)
            self.result["chaos"] = speed(streams, begin) | compare(streams, expected)
            self.result["kills"] = per_kill(monkey.kills, streams, begin)

    def _watch(self, done: Callable[[], bool], say: Callable[[], None]) -> None:
        said = time.monotonic()
        while not done():
            self._check_time()
            time.sleep(0.1)
            if time.monotonic() - said > SAY_S:
                say()
                said = time.monotonic()

    def _check_time(self) -> None:
        if self._options.limit and time.monotonic() - self._begin > self._options.limit:
            raise CutShort(f"{self._options.limit:g} s were over")

    def _progress(self, crowd: Crowd, kills: int, what: str = "") -> None:
        failed = sum(stream.error is not None for stream in list(crowd.streams))
        self._say(f"{crowd.finished} of {len(crowd.streams)} streams done, {failed} failed, {kills} kills  {what}")

    def _say(self, what: str) -> None:
        print(f"{time.monotonic() - self._begin:6.1f} s  {what}", file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="each is asked greedy and seeded")
    parser.add_argument("--streams", type=int, default=200, help="at least so many; more where the kills take longer")
    parser.add_argument("--clients", type=int, default=8, help="streams at a time")
    parser.add_argument("--max-tokens", type=int, default=20)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument(
        "--overlap", type=float, default=0.25, help="share of kills whose recovery the next does not wait for"
    )
    parser.add_argument("--pause", type=float, default=3.0, metavar="SECONDS", help="longest time between kills")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed and when")
    parser.add_argument("--limit", type=float, default=0, metavar="SECONDS", help="stop after so long")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
