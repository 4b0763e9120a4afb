"""`ddtree bench`: every prompt plain and speculative against a running server, and the figures that come of it.

Knows the chat endpoint and its `ddtree` figures; knows no engine and draws nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Any

import httpx

from ddtree.deployments.commands.client import chat_body, get_json, post_chat, settings
from ddtree.deployments.commands.machine import Machine
from ddtree.deployments.requests import STAGES, Budget

MODES = ("plain", "speculative")
WARM_UP_TOKENS = 8

Report = Callable[[int, str], None]  # (requests answered since the last call, what is being done)


@dataclass(frozen=True)
class BenchOptions:
    """What to run. The same request is sent in both modes; only the budget differs."""

    url: str
    prompts: Sequence[str]
    max_tokens: int = 128
    concurrency: int = 1
    budget: Budget | None = None  # of the speculative mode; None is the server's default
    temperature: float = 0.0
    seed: int = 0

    def body(self, prompt: str, mode: str, max_tokens: int | None = None) -> dict[str, Any]:
        """Return the request for `prompt`."""
        return chat_body(
            [{"role": "user", "content": prompt}],
            budget=0 if mode == "plain" else self.budget,
            prefix_cache=False,  # or the mode that comes second would have less to do
            max_tokens=max_tokens or self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
        )


@dataclass(frozen=True)
class Run:
    """One answer in one mode."""

    token_ids: list[int]
    seconds: float  # of this request, as the client saw it
    figures: dict[str, Any]  # the answer's `ddtree` object
    prompt_tokens: int

    @classmethod
    def of(cls, answer: dict[str, Any], seconds: float) -> Run:
        figures = answer["ddtree"]
        return cls(figures["token_ids"], seconds, figures, answer["usage"]["prompt_tokens"])

    def recording(self, name: str) -> dict[str, Any]:
        """Return the answer to the request called `name` as the synthetic drafter reads it."""
        return {"request_id": f"{name}/0", "prompt_tokens": self.prompt_tokens, "token_ids": self.token_ids}

    @property
    def rest(self) -> float:
        """Return the seconds in no stage, prefill or queue: between the stages of a round, between rounds, and HTTP."""
        inside = sum(self.figures["stage_seconds"].values()) + self.figures["prefill_seconds"]
        return self.seconds - inside - self.figures["queue_seconds"]


@dataclass(frozen=True)
class Pair:
    """One prompt's two answers."""

    prompt: str
    plain: Run
    speculative: Run
    name: str  # of its requests in both modes

    @property
    def first_difference(self) -> int | None:
        """Return the first position at which the token ids differ; None when they are equal."""
        pairs = zip_longest(self.plain.token_ids, self.speculative.token_ids)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def run_bench(
    options: BenchOptions, report: Report = lambda done, what: None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the benchmark and return its result, JSON values throughout, and the recording of each plain answer.

    Prompts go in groups of `concurrency`; a group runs in one mode, then in the other, and which comes first
    alternates, so that the modes never share the machine and drift hits both alike. The first group's prompts warm
    up each mode with a few tokens, uncounted.

    Raises:
        ServerError: the server is not there or refuses a request.
    """
    with httpx.Client(**settings(options.url)) as client:
        versions = get_json(client, "/version")
        model = get_json(client, "/v1/models")["data"][0]
        synthetic = get_json(client, "/health").get("synthetic_drafter")
    pairs, seconds = asyncio.run(_run_groups(options, report))
    result = {
        **summarise(pairs, seconds),
        "model": model["id"],
        "synthetic_drafter": synthetic,
        "settings": {
            "max_tokens": options.max_tokens,
            "concurrency": options.concurrency,
            "budget": model["ddtree"]["default_budget"] if options.budget is None else options.budget,
            "temperature": options.temperature,
            "seed": options.seed,
        },
        "machine": asdict(Machine.read()),
        "versions": versions,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rows": [row(pair) for pair in pairs],
    }
    return result, [pair.plain.recording(pair.name) for pair in pairs]


def summarise(pairs: Sequence[Pair], seconds: dict[str, float]) -> dict[str, Any]:
    """Return the figures of a run.

    Args:
        pairs: at least one.
        seconds: per mode, the wall time during which its requests ran (prefill and queueing included).
    """
    runs = {mode: [getattr(pair, mode) for pair in pairs] for mode in MODES}
    tokens = {mode: sum(len(run.token_ids) for run in runs[mode]) for mode in MODES}
    speed = {mode: tokens[mode] / seconds[mode] for mode in MODES}
    rounds = {mode: sum(run.figures["rounds"] for run in runs[mode]) for mode in MODES}
    figures = [run.figures for run in runs["speculative"]]
    accepted = sum(f["accepted_tokens"] for f in figures)
    histograms = zip_longest(*(f["acceptance_histogram"] for f in figures), fillvalue=0)
    stages = {mode: _stages([run.figures["stage_seconds"] for run in runs[mode]], rounds[mode]) for mode in MODES}
    return {
        "prompts": len(pairs),
        "plain_tokens_per_s": speed["plain"],
        "speculative_tokens_per_s": speed["speculative"],
        "speedup": speed["speculative"] / speed["plain"],
        "acceptance_length": (accepted + rounds["speculative"]) / (rounds["speculative"] or 1),
        "acceptance_histogram": [sum(counts) for counts in histograms],
        "identical": sum(pair.first_difference is None for pair in pairs) / len(pairs),
        "tokens": tokens,
        "seconds": seconds,
        "rounds": rounds,
        "drafted_tokens": sum(f["drafted_tokens"] for f in figures),
        "accepted_tokens": accepted,
        "fallback_rounds": sum(f["fallback_rounds"] for f in figures),
        "stage_seconds": {mode: stages[mode][0] for mode in MODES},
        "stage_ms_per_round": {mode: stages[mode][1] for mode in MODES},
        "rest_ms_per_round": {mode: 1e3 * sum(run.rest for run in runs[mode]) / (rounds[mode] or 1) for mode in MODES},
        "prefill_seconds": {mode: sum(run.figures["prefill_seconds"] for run in runs[mode]) for mode in MODES},
        "queue_seconds": {mode: sum(run.figures["queue_seconds"] for run in runs[mode]) for mode in MODES},
    }


def row(pair: Pair) -> dict[str, Any]:
    """Return the line of one prompt in the result."""
    difference = pair.first_difference
    out: dict[str, Any] = {"prompt": pair.prompt, "identical": difference is None, "first_difference": difference}
    for mode in MODES:
        run: Run = getattr(pair, mode)
        names = ("rounds", "acceptance_length", "fallback_rounds", "prefill_seconds", "queue_seconds")
        out[mode] = {"tokens": len(run.token_ids), "seconds": run.seconds} | {name: run.figures[name] for name in names}
        if difference is not None:
            out[mode]["token_ids"] = run.token_ids
    return out


def _stages(per_request: Sequence[dict[str, float]], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return (seconds, milliseconds per round) of the five stages. A round of a batch counts for each request in it."""
    totals = {stage: sum(seconds[stage] for seconds in per_request) for stage in STAGES}
    return totals, {stage: 1e3 * total / (rounds or 1) for stage, total in totals.items()}


async def _run_groups(options: BenchOptions, report: Report) -> tuple[list[Pair], dict[str, float]]:
    pairs: list[Pair] = []
    seconds = dict.fromkeys(MODES, 0.0)
    async with httpx.AsyncClient(**settings(options.url)) as client:
        for mode in MODES:
            report(0, f"warming up, {mode}")
            few = (options.body(p, mode, WARM_UP_TOKENS) for p in options.prompts[: options.concurrency])
            await asyncio.gather(*(post_chat(client, body, "bench-warm-up") for body in few))
        for number, start in enumerate(range(0, len(options.prompts), options.concurrency)):
            group = options.prompts[start : start + options.concurrency]
            names = [f"bench-{start + i}" for i in range(len(group))]
            runs: dict[str, list[Run]] = {}
            for mode in MODES if number % 2 == 0 else reversed(MODES):
                report(0, mode)
                began = time.perf_counter()
                asked = (_timed(client, options.body(prompt, mode), n) for prompt, n in zip(group, names, strict=True))
                runs[mode] = await asyncio.gather(*asked)
                seconds[mode] += time.perf_counter() - began
                report(len(group), mode)
            pairs += [Pair(*pair) for pair in zip(group, runs["plain"], runs["speculative"], names, strict=True)]
    return pairs, seconds


async def _timed(client: httpx.AsyncClient, body: dict[str, Any], name: str) -> Run:
    began = time.perf_counter()
    answer = await post_chat(client, body, name)
    return Run.of(answer, time.perf_counter() - began)
