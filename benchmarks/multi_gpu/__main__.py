"""One target in several layouts: how its verifier is split over GPUs, and where its drafters run.

    python -m benchmarks.multi_gpu CONFIG --layouts 1,1+own,2 --out DIR [--steps rounds,service] [--drafters 1,2,1]
        [--kills "verifier rank,drafter actor"] [--mps] [--limit SECONDS]

Run it in the repository, on Linux. A layout is the verifier's ranks, with +own where drafters have GPUs of their own and do not
share its first one. Rounds are timed by a pod without HTTP (as benchmarks.overhead does), with each transport, and with rounds
that overlap; then the service is measured over HTTP, plain answers are compared with those of the first layout, drafters come and
go, and processes are killed with `kill -9` under load. In float32 an answer does not depend on what it was computed beside; in
bfloat16 the share of those that are the same is told. Works on CPUs, too, to try it. Writes multi-gpu-NAME.json and .md after
each step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import yaml

from ddtree.deployments import models
from ddtree.deployments.commands.bench import BenchOptions, run_bench
from ddtree.deployments.config import AppConfig, read_document

from .. import pod as pods
from ..elastic.tokens import mixed
from ..overhead.windows import Prompts, measure
from ..run import CutShort, head, limited, numbers, read, without_synthetic
from ..serving import recording
from ..serving.mps import multi_process_service
from ..serving.service import run_child, serving
from ..serving.workload import requests
from . import report
from .changes import Changes
from .layouts import Layout

STEPS = ("rounds", "service")
GPUS_S = 120.0  # to time copies between all of them


def main() -> int:
    options = _options()
    prompts, config, found = read(options, options.first)
    document = read_document(options.config)
    for layout in options.layouts:
        layout.document(document)
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options, prompts, document, found)
    with multi_process_service() if options.mps else contextlib.nullcontext():
        run.everything(config.verifier.device == "cuda")
    print(report.markdown(run.result))
    return 1 if run.result["remarks"] else 0


class Run:
    """Every layout in turn. `result` is JSON values throughout, and grows with each step."""

    def __init__(
        self, options: argparse.Namespace, prompts: list[str], document: dict[str, Any], found: models.Models
    ) -> None:
        self._options, self._prompts, self._document, self._models = options, prompts, document, found
        self._begin = time.monotonic()
        self._reference: list[list[int]] | None = None  # plain answers of the first layout that was served
        self.result: dict[str, Any] = {
            **head(options.config.stem, __package__),
            "model": found.served_name,
            "settings": {
                name: getattr(options, name)
                for name in ("streams", "budget", "seconds", "concurrency", "max_tokens", "drafters", "kills", "mps")
            }
            | {"prompts": len(prompts)},
            "gpus": None, "layouts": {}, "remarks": [],
        }  # fmt: skip

    def everything(self, on_gpu: bool) -> None:
        """Where a step fails the reason is a remark, and the next one is taken."""
        try:
            with limited(self._options.limit):
                if on_gpu:
                    self._step("GPUs", self._gpus)
                for layout in self._options.layouts:
                    self._layout(layout)
        except CutShort as error:
            self.result["remarks"].append(str(error))
        self._save()

    def _layout(self, layout: Layout) -> None:
        steps, document = self._options.steps, layout.document(self._document)
        found: dict[str, Any] = {"rounds": [], "service": {}}
        self.result["layouts"][str(layout)] = found
        if "rounds" in steps:
            self._step(f"rounds, layout {layout}", self._rounds, document, found["rounds"])
        if "service" in steps:
            self._step(f"service, layout {layout}", self._service, layout, document, found["service"])

    def _step(self, what: str, step: Callable[..., None], *args: Any) -> None:
        self._say(what)
        try:
            step(*args)
        except CutShort as error:
            raise CutShort(f"{what}: {error}") from None
        except Exception as error:
            self.result["remarks"].append(f"{what}: {type(error).__name__}: {error}")
        self._save()

    def _gpus(self) -> None:
        log = self._options.out / "gpus.log"
        run_child([sys.executable, "-m", "benchmarks.multi_gpu.gpus"], log, GPUS_S)
        self.result["gpus"] = json.loads(log.read_text(encoding="utf-8").splitlines()[-1])

    # -- rounds ----------------------------------------------------------------------------------------------------------

    def _rounds(self, document: dict[str, Any], windows: list[dict[str, Any]]) -> None:
        """A pod for each transport, whose drafter's drafts are its own also where the configuration has synthetic ones: what a
        round costs does not depend on what is accepted."""
        config = without_synthetic(AppConfig.parse(document["applications"][0]["args"]))
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
        try:
            for transport in self._options.transports:
                self._pod(config.model_copy(update={"transport": transport}), windows)
        finally:
            ray.shutdown()

    def _pod(self, config: AppConfig, windows: list[dict[str, Any]]) -> None:
        options, prompts = self._options, Prompts(self._models, self._prompts, 0.0)

        def window(streams: int, budget: int) -> None:
            found = measure(pod, prompts, streams, budget, options.seconds)
            kept = {"transport": config.transport, "overlap": pod.config.scheduler.overlap}
            windows.append({**kept, **asdict(found)})
            self._save()

        pod = pods.start(pods.overlapping(config, "off"), self._models)
        try:
            pod.add_drafter()
            for streams in options.streams:
                window(streams, 0)
                window(streams, options.budget)
            if config.transport == "mailbox":
                pod.config = pods.overlapping(config, "on")
                pod.replace_router()
                window(options.streams[-1], options.budget)
        finally:
            pod.end()

    # -- the service -----------------------------------------------------------------------------------------------------

    def _service(self, layout: Layout, document: dict[str, Any], found: dict[str, Any]) -> None:
        options, prompts = self._options, self._prompts
        config, log = options.out / f"layout-{layout}.yaml", options.out / f"service-{layout}.log"
        config.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
        if document["applications"][0]["args"]["drafter"].get("synthetic"):
            config = recording.replaying(config, options.out, prompts, options.max_tokens, options.concurrency)
        with serving(config, log, drafting=True) as url:
            self._say(f"layout {layout} is served")
            found["runs"] = []
            for concurrency in options.concurrency:
                bench = BenchOptions(url, requests(prompts, concurrency), options.max_tokens, concurrency)
                run, answers = run_bench(bench)
                for name in ("rows", "machine", "date", "versions", "model"):
                    run.pop(name)
                found["runs"].append(run)
                self._compare([answer["token_ids"] for answer in answers[: len(prompts)]], run)
                self._save()
            if options.drafters or options.kills:
                asks = mixed(prompts, options.max_tokens, max(options.streams))
                changes = Changes(url, read_document(config), log, asks, max(options.streams), self._say)
                found["changes"] = changes.found
                changes.run(options.drafters, options.change_seconds, options.kills)

    def _compare(self, answers: list[list[int]], run: dict[str, Any]) -> None:
        """Plain answers beside those of the first layout at its first concurrency."""
        if self._reference is None:
            self._reference = answers
        same = sum(a == b for a, b in zip(answers, self._reference, strict=True))
        run["plain_as_reference"] = same / len(answers)

    # -- all -------------------------------------------------------------------------------------------------------------

    def _say(self, what: str) -> None:
        print(f"{time.monotonic() - self._begin:6.1f} s  {what}", file=sys.stderr, flush=True)

    def _save(self) -> None:
        report.write(self.result, self._options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--layouts", type=_layouts, required=True, metavar="N[+own],…")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, default=Path("tests/data/prompts.jsonl"))
    parser.add_argument("--first", type=int, help="the first so many prompts")
    parser.add_argument("--steps", type=lambda text: text.split(","), default=STEPS, help=f"of {', '.join(STEPS)}")
    parser.add_argument(
        "--streams", type=numbers, default=[1, 16], help="whose rounds are timed; most of them: under changes"
    )
    parser.add_argument("--transports", type=lambda text: text.split(","), default=["mailbox", "objects"])
    parser.add_argument(
        "--budget", type=int, default=31, help="nodes of a tree besides its root, where rounds are timed"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="that rounds are timed for")
    parser.add_argument("--concurrency", type=numbers, default=[1, 8, 32, 64])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument(
        "--drafters", type=numbers, default=[], metavar="N,N,…", help="one number after another, under load"
    )
    parser.add_argument("--change-seconds", type=float, default=5.0, help="with each number of drafters")
    parser.add_argument("--kills", type=lambda text: text.split(","), default=[], help="kinds of process, under load")
    parser.add_argument("--mps", action="store_true", help="under NVIDIA's Multi-Process Service, started for the run")
    parser.add_argument("--limit", type=float, default=0, metavar="SECONDS", help="stop after so long")
    return parser.parse_args()


def _layouts(text: str) -> list[Layout]:
    try:
        return [Layout.parse(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
