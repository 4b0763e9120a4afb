"""Waiting for files: awake for a moment, then asleep. Knows selectors, not what comes.

A sleeping thread takes 50 to 90 µs to wake, several times a round of a few milliseconds; one that polls sees a message at
once. Meanwhile it keeps a core busy, so it polls for a bounded time, and not at all where others need the core.
"""

from __future__ import annotations

import os
import selectors
import time

from ddtree.deployments.cores import usable_cores

AWAKE_S = 0.005  # as long as a small model's round: what takes longer does not notice the waking
CORES = 8  # from here on router, drafter and a verifier's rank can poll at once and leave cores to those that compute

Ready = list[tuple[selectors.SelectorKey, int]]


def awake_s() -> float:
    """Seconds that a thread of this process should poll before it sleeps."""
    return AWAKE_S if usable_cores() >= CORES else 0.0


def select(selector: selectors.BaseSelector, awake_s: float, timeout: float | None = None) -> Ready:
    """`selector.select(timeout)`, of which the first `awake_s` seconds are spent polling. Other threads can run all the time."""
    if awake_s:
        begin = time.monotonic()
        end = begin + (awake_s if timeout is None else min(awake_s, timeout))
        while (now := time.monotonic()) < end:
            if ready := selector.select(0):
                return ready
            os.sched_yield()
        timeout = None if timeout is None else timeout - (now - begin)
    return selector.select(timeout)
