"""What a simulation counts, and the figures that come of it: of what happens in its window, and of requests that come in it.

Times are seconds. What is drawn as the time between tokens is that between two rounds that brought tokens of a stream, as the
service's own `vllm:inter_token_latency_seconds` has it; a round brings several.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from ddtree.deployments.costs import Numbers

if TYPE_CHECKING:
    from .pod import Stream


@dataclass(frozen=True)
class Summary:
    """Of a window; times are 0 where nothing was timed."""

    tokens_per_s: float  # of all pods
    requests_per_s: float  # answered
    refused: int  # requests, as queues were full
    in_system: float  # requests, on average
    ttft_p50_s: float
    ttft_p99_s: float
    gap_p50_s: float  # between two rounds that brought tokens of a stream
    gap_p99_s: float
    token_p50_s: float  # by token, over a whole answer after its first
    token_p99_s: float
    drafter_busy: float  # part of the drafters' time
    pod_busy: float  # part of the pods' time that a round was under way


class Figures:
    """Written by pods and by the simulation."""

    def __init__(self, begin: float = 0.0, end: float = inf) -> None:
        """The window."""
        self.begin, self.end = begin, end
        self.tokens, self.answered, self.refused = 0, 0, 0
        self.last = 0.0  # when anything was delivered
        self.request_s, self.drafting_s, self.round_s = 0.0, 0.0, 0.0  # summed over requests, drafters, pods
        self._first, self._token, self._gap, self._times = array("d"), array("d"), array("d"), array("L")
        self._since: dict[
            float, int
        ] = {}  # when streams that were delivered to at `last` had been before: and how many

    def delivered(self, stream: Stream, tokens: int, now: float) -> None:
        """So many tokens, which it has counted already."""
        if now != self.last:
            self._note_gaps()
            self.last = now
        if self.begin <= now < self.end:
            self.tokens += tokens
            self.answered += not stream.remaining
            if stream.first is not None:
                self._since[stream.delivered] = self._since.get(stream.delivered, 0) + 1
        stream.delivered = now
        asked = self.begin <= stream.arrival < self.end  # whenever it is answered: none that waits long is left out
        if stream.first is None:
            stream.first = now
            if asked:
                self._first.append(now - stream.arrival)
        if asked and not stream.remaining and stream.answer > 1:
            self._token.append((now - stream.first) / (stream.answer - 1))

    def refuse(self, now: float) -> None:
        """A request."""
        self.refused += self.begin <= now < self.end

    def passed(self, since: float, now: float, requests: int) -> None:
        """So many requests were in the system meanwhile."""
        self.request_s += requests * self._part(since, now)

    def drafted(self, since: float, now: float) -> None:
        """A drafter did."""
        self.drafting_s += self._part(since, now)

    def ran(self, since: float, now: float) -> None:
        """A pod had a round under way."""
        self.round_s += self._part(since, now)

    @property
    def seconds(self) -> float:
        """Of the window, or of what there was of it."""
        return min(self.end, self.last) - self.begin

    def times(self) -> tuple[Numbers, Numbers, Numbers]:
        """To first tokens, between rounds, and by token of whole answers."""
        self._note_gaps()
        gaps = np.repeat(np.array(self._gap), np.array(self._times, np.int64))
        return np.array(self._first), gaps, np.array(self._token)

    def _part(self, since: float, now: float) -> float:
        return max(0.0, min(now, self.end) - max(since, self.begin))

    def _note_gaps(self) -> None:
        for since, streams in self._since.items():
            self._gap.append(self.last - since)
            self._times.append(streams)
        self._since.clear()


def summary(runs: Sequence[Figures], pods: int, drafters: int) -> Summary:
    """Of runs of one deployment with so many."""
    seconds = sum(run.seconds for run in runs)
    times = [np.concatenate(values) for values in zip(*(run.times() for run in runs), strict=True)]
    (first, late_first), (gap, late_gap), (token, late_token) = map(_quantiles, times)
    return Summary(
        tokens_per_s=sum(run.tokens for run in runs) / seconds,
        requests_per_s=sum(run.answered for run in runs) / seconds,
        refused=sum(run.refused for run in runs),
        in_system=sum(run.request_s for run in runs) / seconds,
        ttft_p50_s=first,
        ttft_p99_s=late_first,
        gap_p50_s=gap,
        gap_p99_s=late_gap,
        token_p50_s=token,
        token_p99_s=late_token,
        drafter_busy=sum(run.drafting_s for run in runs) / seconds / max(1, drafters),
        pod_busy=sum(run.round_s for run in runs) / seconds / pods,
    )


def _quantiles(values: Numbers) -> tuple[float, float]:
    """Their median and 99th percentile; 0 where there are none."""
    if not len(values):
        return 0.0, 0.0
    middle, late = np.quantile(values, (0.5, 0.99))
    return float(middle), float(late)
