"""How many drafters a deployment wants: what a drafter replica reports to Serve's autoscaler, and a policy over it.

Serve counts the requests that its own handles send. Drafters get none: the router calls their actors directly. So a replica
reports its load itself, and both kinds of policy work from an ordinary `autoscaling_config`: Serve's own, which then holds
`target_ongoing_requests` sequences a drafter, and BusyShare. Serve pickles this module by value; it imports Ray and no torch.
"""

from __future__ import annotations

import time
from statistics import fmean
from typing import Any

from ray.serve.config import AutoscalingContext

SEQUENCES = (
    "running_requests"  # Serve's name for what its own policy targets; a replica's report goes before its handles'
)
BUSY_SHARE = "busy_share"


class LoadMeter:
    """Turns readings of a drafter's load into a report."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None  # when it was read last, and busy seconds then

    def report(self, busy_seconds: float, sequences: int) -> dict[str, float]:
        """`busy_seconds`: since the drafter started. The share is of the time since the last report."""
        now = time.monotonic()
        then, before = self._last or (now, busy_seconds)
        self._last = now, busy_seconds
        share = (busy_seconds - before) / (now - then) if now > then else 0.0
        return {SEQUENCES: float(sequences), BUSY_SHARE: min(1.0, share)}


class BusyShare:
    """As many drafters as keep each busy for `target` of the time. Bounds, delays and factors are Serve's.

    A round drafts, then verifies: under steady load the busy share is the part of a round that drafting takes.
    """

    def __init__(self, target: float = 0.5) -> None:
        """Raises ValueError unless 0 < target <= 1."""
        if not 0 < target <= 1:
            raise ValueError(f"policy_kwargs.target ({target}) is a share of the time: above 0, at most 1")
        self._target = target

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Serve's interface: the number of replicas wanted, and the state to keep."""
        shares = (context.aggregated_metrics or {}).get(BUSY_SHARE)
        if not shares:  # nobody has reported yet
            return context.target_num_replicas, {}
        return context.current_num_replicas * fmean(shares.values()) / self._target, {}
