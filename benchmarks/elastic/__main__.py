"""Serves a configuration, records what it answers, then asks on while the number of drafters changes.

    python -m benchmarks.elastic CONFIG --streams 16 --drafters 1,4,1 --seconds 40 --out DIR [--mps] [--limit SECONDS]

Run it in the repository, on Linux. Each number of drafters is asked for by deploying the application again, and stays for so
many seconds once the router has them all. In float32 an answer does not depend on what it was computed beside, and none may
change; else the share of those that did not is told. Writes elastic-NAME.json, .md and .png and the service's output; the exit
status is 1 where a stream failed or changed, a number of drafters was not reached or did not stay, or the run was cut short.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import SubprocessError
from typing import Any

import yaml

from ddtree.deployments.config import AppConfig, read_document

from ..chaos.findings import speed
from ..chaos.streams import Ask, Crowd, Stream
from ..run import CutShort, head, limited, numbers, read
from ..serving.mps import multi_process_service
from ..serving.service import Failed, serving
from . import plot, report
from .drafters import Drafters, with_drafters
from .findings import Phase, answers, passed, per_phase, throughput
from .tokens import Meter, mixed

PROMPTS = Path("tests/data/prompts.jsonl")
POLL_S = 0.2
SAY_S = 5.0


def main() -> int:
    options = _options()
    prompts, config, found = read(options)
    if config.drafter.checkpoint is None:
        sys.exit(f"error: {options.config} has no drafter, and the number of drafters is to change")
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options, prompts, config, found.served_name)
    run.everything()
    print(report.markdown(run.result))
    return 0 if run.result["passed"] else 1


class Run:
    """The reference, the load with its phases, and what came of them. `result` is JSON values throughout."""

    def __init__(self, options: argparse.Namespace, prompts: list[str], config: AppConfig, model: str) -> None:
        self._options, self._begin = options, time.monotonic()
        self._exact = config.target.dtype == "float32"
        self._asks = mixed(prompts, options.max_tokens, options.streams)
        self.result: dict[str, Any] = {
            **head(options.config.stem, __package__),
            "model": model,
            "settings": {
                "streams": options.streams, "drafters": options.drafters, "seconds": options.seconds,
                "max_tokens": options.max_tokens, "mps": options.mps, "dtype": config.target.dtype,
                "budget": config.tree.budget,
            },
            "reference": {}, "load": {}, "throughput": [], "drafters": [], "phases": [], "remarks": [], "passed": False,
        }  # fmt: skip

    def everything(self) -> None:
        """Whatever ends it is a remark; what was found until then is written."""
        options, found = self._options, self.result
        document = with_drafters(read_document(options.config), options.drafters[0])
        config, log = options.out / f"elastic-{options.config.stem}.yaml", options.out / "service.log"
        config.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
        try:
            with (
                limited(options.limit),
                multi_process_service() if options.mps else contextlib.nullcontext(),
                serving(config, log, drafting=True) as url,
            ):
                drafters = Drafters(url, document, log)
                self._say("the service is up")
                expected = self._reference(url)
                self._load(url, drafters, expected)
        except (CutShort, RuntimeError, OSError, SubprocessError) as error:
            found["remarks"].append(f"{type(error).__name__}: {error}")
        found["passed"] = passed(found)
        report.write(found, options.out)
        plot.draw(found, options.out)

    def _reference(self, url: str) -> dict[Ask, Stream]:
        """What each request is answered while nothing changes."""
        begin = time.monotonic()
        with Crowd(url, self._asks, self._options.streams) as crowd:
            self._watch(lambda: not crowd.running, lambda: self._progress(crowd, "reference"))
        if failed := [stream.error for stream in crowd.streams if stream.error]:
            raise Failed(
                f"while nothing changed {len(failed)} streams failed: {failed[0]}", self._options.out / "service.log"
            )
        self.result["reference"] = speed(crowd.streams, begin)
        return {stream.ask: stream for stream in crowd.streams}

    def _load(self, url: str, drafters: Drafters, expected: dict[Ask, Stream]) -> None:
        """The phases, one after the other, under streams without end."""
        begin, phases, over = time.monotonic(), list[Phase](), False
        crowd = Crowd(url, self._asks, self._options.streams, more=lambda: not over)
        meter = Meter(crowd)
        try:
            with meter, crowd:
                for number in self._options.drafters:
                    phases.append(Phase(number, time.monotonic(), drafters.look()))
                    self._phase(phases[-1], drafters, crowd)
                over = True
                self._watch(lambda: not crowd.running, lambda: self._progress(crowd, "the last answers"))
        finally:
            streams = [replace(one, times=[*one.times]) for one in list(crowd.streams)]  # where cut short some go on
            ended = [phase.ended for phase in phases if phase.ended]
            end = ended[-1] if over else time.monotonic()
            self.result["load"] = speed(streams, begin) | answers(streams, expected, self._exact)
            self.result["throughput"] = throughput(meter.counts, begin, end)
            self.result["drafters"] = [(at - begin, number) for at, number in drafters.seen]
            self.result["phases"] = per_phase(phases, drafters.seen, meter.counts, streams, begin)

    def _phase(self, phase: Phase, drafters: Drafters, crowd: Crowd) -> None:
        """Raises NotReached."""

        def reached() -> bool:
            return drafters.reached(phase.drafters, phase.asked)

        def say() -> None:
            self._progress(crowd, f"{drafters.seen[-1][1]} of {phase.drafters} drafters")

        def over() -> bool:
            phase.after = drafters.look()
            return time.monotonic() - begin > self._options.seconds

        if not reached():
            drafters.ask(phase.drafters)
        self._watch(reached, say)
        phase.reached = begin = time.monotonic()
        self._say(f"{phase.drafters} drafters after {begin - phase.asked:.1f} s")
        self._watch(over, say)
        phase.ended = time.monotonic()

    def _watch(self, done: Callable[[], bool], say: Callable[[], None]) -> None:
        said = time.monotonic()
        while not done():
            time.sleep(POLL_S)
            if time.monotonic() - said > SAY_S:
                say()
                said = time.monotonic()

    def _progress(self, crowd: Crowd, what: str) -> None:
        failed = sum(stream.error is not None for stream in list(crowd.streams))
        self._say(f"{crowd.finished} of {len(crowd.streams)} streams done, {failed} failed, {what}")

    def _say(self, what: str) -> None:
        print(f"{time.monotonic() - self._begin:6.1f} s  {what}", file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="asked greedy and seeded in turn")
    parser.add_argument("--streams", type=int, default=16, help="at a time")
    parser.add_argument(
        "--drafters", type=_drafters, default=[1, 4, 1], metavar="N,N,…", help="one number after another"
    )
    parser.add_argument("--seconds", type=float, default=40, help="with each number, once the drafters are there")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--mps", action="store_true", help="under NVIDIA's Multi-Process Service, started for the run")
    parser.add_argument("--limit", type=float, default=0, metavar="SECONDS", help="stop after so long")
    return parser.parse_args()


def _drafters(text: str) -> list[int]:
    found = numbers(text)
    if min(found) < 1:
        raise argparse.ArgumentTypeError("there is to be a drafter at any time")
    return found


if __name__ == "__main__":
    sys.exit(main())
