"""What a pod waits for: processes that fail and come back, and the drafters among them, which serve one call after another.

They are asked in the order of time. Knows no pods.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

HOUR = 3600.0


@dataclass(frozen=True)
class Failures:
    """Of each process of a kind."""

    per_hour: float = 0.0  # of its time up: the time to the next is exponential
    recovery_s: float = 0.0  # from its end until another does its work


NEVER = Failures()


class Process:
    """One that fails."""

    def __init__(self, failures: Failures, seed: np.random.SeedSequence) -> None:
        self._failures, self._random = failures, np.random.default_rng(seed)
        self.lives = 0  # that have ended, as far as anybody has asked
        self.down = -failures.recovery_s  # when its last life ended, or the present one will
        self.up = -failures.recovery_s  # when it is back from there
        self._next()

    def ready(self, now: float) -> float:
        """When it works: `now`, unless it is down."""
        while self.up <= now:
            self.lives += 1
            self._next()
        return self.up if self.down <= now else now

    def _next(self) -> None:
        rate = self._failures.per_hour / HOUR
        self.down = self.up + (float(self._random.exponential(1 / rate)) if rate else inf)
        self.up = self.down + self._failures.recovery_s


class Drafter(Process):
    """One that drafts for its pods in the order of their calls."""

    def __init__(self, failures: Failures, seed: np.random.SeedSequence) -> None:
        super().__init__(failures, seed)
        self.free = 0.0  # when it has done what was asked

    def draft(self, now: float, seconds: float) -> tuple[float, bool]:
        """Asked while it is up for a draft that takes so long: when the wait for it ends, and whether there is a draft then."""
        done = max(now, self.free) + seconds
        if done > self.down:
            return self.down, False
        self.free = done
        return done, True
