"""Requests that come at random whatever is answered, and what each client got when. Knows the chat endpoint alone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from ddtree.deployments.requests import Budget

from ..chaos.streams import Stream, follow
from ..elastic.tokens import Counted

EVERY_S = 0.05


@dataclass
class Timed(Stream):
    """Says how many tokens there were at each of its times, too."""

    counts: list[int] = field(default_factory=lambda: [0])

    def take(self, chunk: dict[str, Any]) -> None:
        super().take(chunk)
        self.counts.append(self.completion_tokens)


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """When requests come, in seconds from the first moment on: a Poisson process of `rate` a second."""
    drawn, now, found = random.Random(seed), 0.0, []
    while (now := now + drawn.expovariate(rate)) < seconds:
        found.append(now)
    return found


def send(
    url: str, prompts: Sequence[str], times: Sequence[float], budget: Budget, max_tokens: int, patience_s: float
) -> tuple[float, list[Timed]]:
    """Ask for an answer to one prompt after the other at these times. Returns when that began (seconds, monotonic) and the
    streams; those that have not ended so long after the last request are cut off."""
    cut, streams, threads = threading.Event(), list[Timed](), []
    begin = time.monotonic()
    for seed, (after, prompt) in enumerate(zip(times, cycle(prompts), strict=False)):
        time.sleep(max(0.0, begin + after - time.monotonic()))
        asked = Counted(prompt, max_tokens, seed=seed, budget=budget)
        streams.append(Timed(asked, [begin + after]))  # a client that is late has waited since then
        threads.append(threading.Thread(target=follow, args=(url, streams[-1], cut), daemon=True))
        threads[-1].start()
    until = time.monotonic() + patience_s
    while any(thread.is_alive() for thread in threads) and time.monotonic() < until:
        time.sleep(EVERY_S)
    cut.set()
    for thread in threads:
        thread.join()
    return begin, streams
