"""What the links of both transports share. Knows what Ray raises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from ddtree.deployments.round_loop import PeerLost
from ddtree.verifier.batch import VerifyResult

# What a peer's answer can raise: its death, an error in its method, our deadline, a transfer cut short.
LOST = (RayError, TimeoutError, OSError)


@dataclass(frozen=True)
class Verified:
    """A verify result as a drafter is told of it. Written by the verifier's link."""

    result: VerifyResult  # as the router sees it
    reference: Any  # a Letter, or Ray's reference to the result
    outbox: Any = None  # Ray's reference to the arena that a letter's tensors are in
    mapped: bool = True  # `reference` names memory of the router's node


def why(error: BaseException) -> str:
    """The error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"


def lose(ranks: Sequence[ActorHandle], error: BaseException) -> PeerLost:
    """End what is left of a verifier group: where one rank is gone the others may wait for it for ever, and one that is late
    would still take the steps that it was sent."""
    for rank in ranks:
        ray.kill(rank)
    return PeerLost(why(error))
