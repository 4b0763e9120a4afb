"""Serves a configuration and measures it: plain and speculative at each concurrency, beside other engines, under a long prompt.

    python -m benchmarks.serving CONFIG --prompts FILE.jsonl --concurrency 1,8,32,64 --max-tokens 128 --out DIR
        [--beside generate,vllm] [--long-prompt 8000] [--mps] [--limit SECONDS]

Run it in the repository, on the machine that is to be measured. Greedy. Writes serving-NAME.json (every figure), serving-NAME.md
(tables) and serving-NAME.png, and the output of the processes it starts; what is there is written after each step, so that a
run that is cut short keeps what it has. Where the configuration has a synthetic drafter, plain decoding is recorded first.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddtree.deployments import models
from ddtree.deployments.commands.bench import BenchOptions, run_bench
from ddtree.deployments.config import AppConfig
from ddtree.verifier.model_dir import random_weights

from ..run import head, numbers, read
from . import long_prompt, plot, recording, report
from .mps import multi_process_service
from .peers import PEERS, Job, run_peer
from .service import serving
from .workload import requests

PER_RUN = ("model", "synthetic_drafter", "machine", "versions", "date")  # of run_bench's result: the same in every run
PEER_S = 600.0  # most time for one peer


def main() -> int:
    options = _options()
    prompts, config, found = read(options, options.first)
    if options.long_prompt >= found.max_context:
        sys.exit(f"error: --long-prompt {options.long_prompt} leaves no room in the context of {found.max_context}")
    options.out.mkdir(parents=True, exist_ok=True)
    measurement = Measurement(options, prompts, config, found)
    for ending in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(ending, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, options.limit)
    try:
        with multi_process_service() if options.mps else contextlib.nullcontext():
            measurement.run()
    except KeyboardInterrupt:
        measurement.remark("cut short")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        measurement.save()
    print(report.markdown(measurement.result))
    return 1 if measurement.result["remarks"] else 0


class Measurement:
    """One run of everything that the options ask for. `result` grows with each step."""

    def __init__(
        self, options: argparse.Namespace, prompts: list[str], config: AppConfig, found: models.Models
    ) -> None:
        self._options, self._prompts, self._config, self._models = options, prompts, config, found
        self._answers: dict[int, list[list[int]]] = {}  # plain ones by concurrency
        self._begin = time.monotonic()
        self.result: dict[str, Any] = {
            **head(options.config.stem, __package__),
            "model": found.served_name,
            "versions": {},
            "config": config.model_dump(mode="json"),
            "settings": {"prompts": len(prompts), "max_tokens": options.max_tokens, "mps": options.mps},
            "synthetic_drafter": None,
            "runs": [],
            "long_prompt": None,
            "peers": {},
            "timeline": {},  # step → seconds after the start at which it began
            "remarks": [],
        }

    def run(self) -> None:
        """Raises KeyboardInterrupt when the time is over."""
        self._attempt("service", self._service)
        for name in self._options.beside:
            self._attempt(name, self._peer, name)

    def remark(self, what: str) -> None:
        self.result["remarks"].append(f"after {time.monotonic() - self._begin:.0f} s: {what}")
        self.save()

    def save(self) -> None:
        report.write(self.result, self._options.out)
        plot.draw(self.result, self._options.out)

    def _attempt(self, what: str, step: Callable[..., None], *args: Any) -> None:
        """Take a step. Where it fails the reason is a remark: the next one may go well."""
        self._say(what)
        try:
            step(*args)
        except Exception as error:
            self.remark(f"{what}: {type(error).__name__}: {error}")

    def _service(self) -> None:
        config = self._recorded() if self._config.drafter.synthetic else self._options.config
        with serving(config, self._options.out / "service.log", drafting=self._drafting) as url:
            for concurrency in self._options.concurrency:
                self._attempt(f"{concurrency} streams", self._sweep, url, concurrency)
            if self._options.long_prompt:
                self._attempt("long prompt", self._long_prompt, url)
            self._say("end of the service")

    def _recorded(self) -> Path:
        options = self._options
        config = recording.replaying(
            options.config, options.out, self._prompts, options.max_tokens, options.concurrency
        )
        self._say("recorded")
        return config

    @property
    def _drafting(self) -> bool:
        return self._config.drafter.checkpoint is not None

    def _sweep(self, url: str, concurrency: int) -> None:
        prompts = requests(self._prompts, concurrency)
        run, answers = run_bench(BenchOptions(url, prompts, self._options.max_tokens, concurrency))
        self._answers[concurrency] = [answer["token_ids"] for answer in answers]
        self.result |= {key: run.pop(key) for key in PER_RUN}
        del run["rows"]
        self.result["runs"].append(run)
        self.save()

    def _long_prompt(self, url: str) -> None:
        bench = BenchOptions(url, self._prompts, self._options.max_tokens)
        self.result["long_prompt"] = long_prompt.measure(bench, self._options.long_prompt)
        self.save()

    def _peer(self, name: str) -> None:
        options, config, target = self._options, self._config, self._models.target
        job = Job(
            model_dir=str(target.model_dir),
            device=config.verifier.device,
            dtype=config.target.dtype,
            threads=config.verifier.threads,
            memory_fraction=config.verifier.gpu_memory_fraction,
            stop_token_ids=target.eos_token_ids,
            prompts=tuple(self._prompts),
            max_tokens=options.max_tokens,
            concurrency=tuple(options.peer_concurrency),
        )
        peer: dict[str, Any] = {}
        self.result["peers"][name] = peer
        try:
            python = options.vllm_python if name == "vllm" else sys.executable
            run_peer(name, job, options.out, PEER_S, peer, python)
        finally:
            for concurrency, run in peer["runs"].items():
                theirs, ours = run.pop("token_ids"), self._answers.get(int(concurrency))
                comparable = ours and not random_weights(target.model_dir)  # else each engine makes its own weights
                same = sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours) if comparable else None
                run["identical_to_plain"] = same
            self.save()

    def _say(self, what: str) -> None:
        seconds = self.result["timeline"][what] = round(time.monotonic() - self._begin, 1)
        print(f"{seconds:6.1f} s  {what}", file=sys.stderr, flush=True)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with prompt, question or turns on each line")
    parser.add_argument("--first", type=int, help="the first so many prompts")
    parser.add_argument("--concurrency", type=numbers, default=(1, 8, 32, 64))
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--beside", type=_peers, default=(), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--peer-concurrency", type=numbers, default=(1, 32))
    parser.add_argument("--vllm-python", default=sys.executable, help="an interpreter that has vLLM, and this package")
    parser.add_argument("--long-prompt", type=int, default=0, metavar="TOKENS")
    parser.add_argument("--mps", action="store_true", help="under NVIDIA's Multi-Process Service, started for the run")
    parser.add_argument("--limit", type=float, default=0, metavar="SECONDS", help="stop after so long")
    return parser.parse_args()


def _peers(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(PEERS):
        raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
