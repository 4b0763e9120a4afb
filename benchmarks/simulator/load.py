"""Requests: how long they are and when they come. Knows no service.

An open load has its own rate, whatever is answered; a closed one is streams that ask anew when they are answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Protocol

import numpy as np

LONGEST = 8  # times the mean, where lengths are cut
DRAWN = 1024  # numbers at a time

Tokens = tuple[int, int]  # of a prompt and its answer, at least 1 each


class Load(Protocol):
    """Who asks."""

    def arrivals(self) -> Iterator[tuple[float, Tokens]]:
        """Requests that come by themselves, in order: when, in seconds, and how long they are."""
        ...

    def answered(self, now: float) -> Tokens | None:
        """A request was answered now; the one that follows it."""
        ...


@dataclass(frozen=True)
class Lengths:
    """Log-normal with these means, in tokens."""

    prompt: int
    answer: int
    spread: float = 0.0  # standard deviation, as a part of the mean; 0: all are alike

    def draw(self, random: np.random.Generator) -> Iterator[Tokens]:
        """Without end."""
        while True:
            yield from zip(self._some(random, self.prompt), self._some(random, self.answer), strict=True)

    def _some(self, random: np.random.Generator, mean: int) -> list[int]:
        sigma = float(np.sqrt(np.log1p(self.spread**2)))
        drawn = mean * random.lognormal(-(sigma**2) / 2, sigma, DRAWN)
        found: list[int] = np.clip(np.rint(drawn), 1, LONGEST * mean).astype(int).tolist()
        return found


class Poisson:
    """Open."""

    def __init__(self, requests: Iterable[Tokens], rate: float, seconds: float, random: np.random.Generator) -> None:
        """`rate` a second, for so many `seconds`."""
        self._requests, self._rate, self._seconds, self._random = iter(requests), rate, seconds, random

    def arrivals(self) -> Iterator[tuple[float, Tokens]]:
        now = 0.0
        while True:
            for gap in self._random.exponential(1 / self._rate, DRAWN).tolist():
                now += gap
                if now >= self._seconds:
                    return
                yield now, next(self._requests)

    def answered(self, now: float) -> Tokens | None:
        return None


class Streams:
    """Closed."""

    def __init__(self, requests: Iterable[Tokens], streams: int, seconds: float = inf) -> None:
        """Asks until `requests` or `seconds` end."""
        self._requests, self._streams, self._seconds = iter(requests), streams, seconds

    def arrivals(self) -> Iterator[tuple[float, Tokens]]:
        for request in islice(self._requests, self._streams):
            yield 0.0, request

    def answered(self, now: float) -> Tokens | None:
        return next(self._requests, None) if now < self._seconds else None
