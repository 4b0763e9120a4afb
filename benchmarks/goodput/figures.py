"""What streams of an open load come to in a window: tokens in time, and the times to first tokens and between tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .load import Timed


@dataclass(frozen=True)
class Objective:
    """What an answer must keep to be in time, in seconds."""

    first: float  # to its first token
    token: float  # by token after the first ones, over the answer


@dataclass(frozen=True)
class Figures:
    """Of the requests that came in a window; times in seconds, 0 where nothing was timed."""

    seconds: float  # of the window
    requests: int
    answered: int  # wholly, sooner or later
    good: int  # in time
    good_tokens: int  # of these
    tokens: int  # that came in the window, whoever asked for them when
    ttft_p50: float
    ttft_p99: float
    gap_p50: float  # between two deltas that brought tokens
    gap_p99: float
    token_p50: float  # by token, over an answer after its first delta
    token_p99: float


def figures(streams: Iterable[Timed], begin: float, end: float, objective: Objective) -> Figures:
    """Of the window from `begin` to `end`, monotonic seconds."""
    first, gaps, by_token = list[float](), list[float](), list[float]()
    requests = answered = good = good_tokens = tokens = 0
    for stream in streams:
        steps = [(stream.times[0], 0)]
        steps += [(at, count) for (at, count), (_, old) in _steps(stream) if count > old]
        tokens += sum(new - old for (_, old), (at, new) in pairwise(steps) if begin <= at < end)
        if not begin <= steps[0][0] < end:
            continue
        requests += 1
        if len(steps) == 1:
            continue
        took = steps[1][0] - steps[0][0]
        first.append(took)
        gaps += [b - a for (a, _), (b, _) in pairwise(steps[1:])]
        if stream.finish_reason is None:
            continue
        answered += 1
        (began, had), (ended, has) = steps[1], steps[-1]
        each = (ended - began) / max(1, has - had)
        by_token.append(each)
        if took <= objective.first and each <= objective.token:
            good += 1
            good_tokens += has
    counts = (requests, answered, good, good_tokens, tokens)
    return Figures(end - begin, *counts, *_quantiles(first), *_quantiles(gaps), *_quantiles(by_token))


def _steps(stream: Timed) -> Iterable[tuple[tuple[float, int], tuple[float, int]]]:
    """Every chunk's time and count, beside those before it."""
    chunks = list(zip(stream.times, stream.counts, strict=True))
    return zip(chunks[1:], chunks, strict=False)


def _quantiles(values: Sequence[float]) -> tuple[float, float]:
    """Their median and 99th percentile."""
    if not values:
        return 0.0, 0.0
    middle, late = np.quantile(values, (0.5, 0.99))
    return float(middle), float(late)
