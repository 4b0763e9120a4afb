"""What a long prompt does to streams that are running: the time between two deltas of a stream, before and meanwhile."""

from __future__ import annotations

import math
import random
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from ddtree.deployments.commands.bench import MODES, BenchOptions
from ddtree.deployments.commands.client import TIMEOUT, ServerError, stream_chat

STREAMS = 4
SETTLE_DELTAS = 16  # of each stream, uncounted
QUIET_DELTAS = 100  # of each stream, before the prompt arrives
ARRIVALS = 3  # of the prompt, one after the other: one alone gives few deltas to take a percentile of
SMALLEST_VOCABULARY = 256
PATIENCE_S = 300.0  # for a stream that does not move


def measure(options: BenchOptions, tokens: int) -> dict[str, Any]:
    """Return the figures of both modes: `options.prompts` in four streams while a prompt of `tokens` tokens is prefilled.

    Raises:
        ServerError: the server refuses the prompt or ends a stream.
    """
    figures = {mode: _measure(options, mode, tokens) for mode in reversed(MODES)}
    return {"prompt_tokens": tokens, "streams": STREAMS, "arrivals": ARRIVALS, **figures}


def _measure(options: BenchOptions, mode: str, tokens: int) -> dict[str, Any]:
    streams = [_Stream(options, mode, i) for i in range(STREAMS)]
    for stream in streams:
        stream.thread.start()
    try:
        _until(streams, SETTLE_DELTAS)
        settled = time.perf_counter()
        _until(streams, QUIET_DELTAS)
        arrivals = [_send(options, mode, tokens, seed) for seed in range(ARRIVALS)]
    finally:
        for stream in streams:
            stream.stop.set()
    for stream in streams:
        stream.thread.join(PATIENCE_S)
    gaps = [gap for stream in streams for gap in stream.gaps()]
    before = [end - begin for begin, end in gaps if begin >= settled and end <= arrivals[0][0]]
    meanwhile = [end - begin for begin, end in gaps if any(begin < stop and end > start for start, stop in arrivals)]
    figures = {"before": _percentiles(before), "meanwhile": _percentiles(meanwhile)}
    return {
        **figures,
        "p99_ratio": figures["meanwhile"]["p99_ms"] / figures["before"]["p99_ms"],
        "prompt_seconds": statistics.median(stop - start for start, stop in arrivals),
    }


@dataclass
class _Stream:
    """Asks one prompt after another and notes when each delta comes."""

    options: BenchOptions
    mode: str
    number: int
    answers: list[list[float]] = field(default_factory=list)  # arrival of each delta, by answer
    deltas: int = 0
    error: Exception | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)

    def gaps(self) -> list[tuple[float, float]]:
        """When each delta and the one after it in the same answer came."""
        return [pair for answer in self.answers for pair in pairwise(answer)]

    def _run(self) -> None:
        prompts = self.options.prompts
        try:
            with httpx.Client(base_url=self.options.url, timeout=TIMEOUT) as client:
                while not self.stop.is_set():
                    index = (self.number + STREAMS * len(self.answers)) % len(prompts)
                    client.headers["x-request-id"] = f"bench-{index}"  # as run_bench calls it: a recording's name
                    self._listen(client, self.options.body(prompts[index], self.mode))
        except ServerError as error:
            self.error = error

    def _listen(self, client: httpx.Client, body: dict[str, Any]) -> None:
        arrivals: list[float] = []
        self.answers.append(arrivals)
        with closing(stream_chat(client, body)) as chunks:
            for chunk in chunks:
                if chunk["choices"][0]["delta"].get("content"):
                    arrivals.append(time.perf_counter())
                    self.deltas += 1
                if self.stop.is_set():
                    return


def _until(streams: Sequence[_Stream], deltas: int) -> None:
    """Wait until each stream has so many deltas more than now."""
    goals = [stream.deltas + deltas for stream in streams]
    deadline = time.monotonic() + PATIENCE_S
    while any(stream.deltas < goal for stream, goal in zip(streams, goals, strict=True)):
        if error := next((stream.error for stream in streams if stream.error), None):
            raise error
        if time.monotonic() > deadline:
            raise ServerError(f"a stream gave fewer than {deltas} deltas in {PATIENCE_S:.0f} s")
        time.sleep(0.005)


def _send(options: BenchOptions, mode: str, tokens: int, seed: int) -> tuple[float, float]:
    """When the prompt, random bytes as far as a byte tokenizer goes, was sent and when its first token came."""
    ids = random.Random(seed).choices(range(SMALLEST_VOCABULARY), k=tokens)
    extension = options.body("", mode)["ddtree"] | {"return_token_ids": False}
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0.0, "ddtree": extension}
    begin = time.perf_counter()
    response = httpx.post(f"{options.url}/v1/completions", json=body, timeout=TIMEOUT)
    if response.status_code != 200:
        raise ServerError(f"the server answered {response.status_code}: {response.text[:200]}")
    return begin, time.perf_counter()


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    p50, p99 = (1e3 * ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.99))
    return {"p50_ms": p50, "p99_ms": p99, "samples": len(ordered)}
