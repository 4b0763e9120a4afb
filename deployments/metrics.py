"""What a router counts for `GET /metrics`: plain numbers, written between rounds, a few µs a round. Knows no names and no
Prometheus: an ingress asks for a snapshot and writes it out (api/metrics.py), so that no scrape holds up a round.

The router counts requests too. It is the one process that sees all of them, whichever ingress they came through.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ddtree.deployments.requests import STAGES

if TYPE_CHECKING:
    from ddtree.deployments.sequence import Sequence

# Upper bounds of buckets in seconds. vLLM's, and finer ones below where a round takes a few milliseconds.
REQUEST_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
TOKEN_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80
)  # fmt: skip


@dataclass
class Totals:
    """Counts since start, for health and figures."""

    rounds: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    forecast_tokens: float = 0.0  # draft tokens that were expected to be accepted where the budget adapts
    forecast_accepted: int = 0  # and those that were
    fallbacks: int = 0  # decoding rounds of a sequence that wanted a draft and had none
    moves: int = 0  # of running sequences to a drafter, or from one to another
    moved_rows: int = 0  # tokens that were run through the target again for them


class Histogram:
    """Counts of values by bucket."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds`: of the buckets, inclusive, ascending. One more bucket is above them all."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


def _of_requests() -> Histogram:
    return Histogram(REQUEST_S)


@dataclass
class Metrics:
    """Sums since start that only `/metrics` shows. Written by the round thread; `sequence` times are of its clock."""

    prefix_cache: bool  # whether prompts are looked up at all
    stage_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    tree_sizes: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # trees by nodes besides the root
    accepted: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # drafted trees by accepted draft tokens
    prompt_tokens: int = 0
    looked_up_tokens: int = 0  # of prompts, in the prefix cache
    cached_tokens: int = 0  # found there
    queue: Histogram = field(default_factory=_of_requests)
    prefill: Histogram = field(default_factory=_of_requests)
    first_token: Histogram = field(default_factory=_of_requests)
    next_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_S))  # between two rounds that brought tokens
    request: Histogram = field(default_factory=_of_requests)  # from arrival to the last token

    def round(self, seconds: dict[str, float]) -> None:
        """A round has ended. `seconds` by stage."""
        for stage, spent in seconds.items():
            self.stage_seconds[stage] += spent

    def tree(self, nodes: int, accepted: int) -> None:
        """A tree of so many `nodes` besides the root was verified, and as many of them accepted."""
        self.tree_sizes[nodes] += 1
        if nodes:
            self.accepted[accepted] += 1

    def delivered(self, sequence: Sequence, finished: bool) -> None:
        """A round brought tokens of a request, its last ones if `finished`."""
        now = time.monotonic()
        if sequence.delivered is None:
            self._first(sequence, now)
        else:
            self.next_tokens.observe(now - sequence.delivered)
        sequence.delivered = now
        if finished:
            self.request.observe(now - sequence.arrival)

    def _first(self, sequence: Sequence, now: float) -> None:
        started, prompt = sequence.started or now, len(sequence.request.prompt_ids)
        self.queue.observe(started - sequence.arrival)
        self.prefill.observe(now - started)
        self.first_token.observe(now - sequence.arrival)
        self.prompt_tokens += prompt
        if self.prefix_cache and sequence.request.prefix_cache:
            self.looked_up_tokens += prompt
            self.cached_tokens += sequence.stats.cached_tokens

    def copy(self) -> Metrics:
        """As they are now, for another thread: the dicts may grow."""
        return replace(self, tree_sizes=dict(self.tree_sizes), accepted=dict(self.accepted))


@dataclass(frozen=True)
class Snapshot:
    """A router at the moment of a scrape."""

    pod: int  # its number
    verifier_connected: bool
    running: int  # sequences
    waiting: int
    kv_usage: float  # part of the pages that sequences hold, 0 to 1
    drafters: int
    horizon: int  # deepest node of a tree
    preemptions: int
    totals: Totals
    metrics: Metrics
