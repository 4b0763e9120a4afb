"""The router's view of its peers: Ray calls with deadlines, and every way they fail turned into PeerLost.

Results stay where they are made, as Ray Direct Transport objects that each receiver reads: candidates by the router, features
by the drafters. Arguments are a few kilobytes and travel inside the call. Knows Ray and the device actors' methods, nothing of
trees or requests.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from torch import Tensor

from ddtree.deployments import shm_transport, wire
from ddtree.deployments.round_loop import PeerLost
from ddtree.drafter.items import Candidates, DraftItem
from ddtree.verifier.batch import VerifyBatch, VerifyResult

# What `ray.get` of a device actor's result can raise: its death, an error in its method, our deadline, a transfer cut short.
_LOST = (RayError, TimeoutError, OSError)


class RayDrafter:
    """A DrafterActor. `start` and `result` come in turn."""

    def __init__(self, drafter_id: str, actor: ActorHandle, timeout_s: float) -> None:
        self.id = drafter_id
        self._actor, self._timeout = actor, timeout_s
        self._draft = actor.draft.options(tensor_transport=shm_transport.NAME)
        self._pending: Any = None

    def start(self, items: list[DraftItem], features: Any) -> None:
        """Begin a draft. `features` is the reference to the verify result whose rows the items name, or None."""
        try:
            self._pending = self._draft.remote(items, features)
        except _LOST as error:
            raise PeerLost(_why(error)) from error

    def result(self) -> tuple[Tensor, Tensor]:
        try:
            candidates: Candidates = ray.get(self._pending, timeout=self._timeout)
        except _LOST as error:
            raise PeerLost(_why(error)) from error
        finally:
            self._pending = None
        return candidates.logprobs, candidates.ids

    def release(self, sequences: list[str]) -> None:
        """Forget sequences; nobody waits for it."""
        self._actor.release.remote(sequences)


class RayVerifier:
    """The verifier group, through its first rank."""

    def __init__(self, rank: ActorHandle, timeout_s: float) -> None:
        self._step = rank.step.options(tensor_transport=shm_transport.NAME)
        self._timeout = timeout_s

    def step(self, batch: VerifyBatch) -> tuple[VerifyResult, Any]:
        """Raises PeerLost, and RuntimeError where the rank lives but its step failed: trying again would not help."""
        try:
            reference = self._step.remote(wire.dumps(batch))
            return ray.get(reference, timeout=self._timeout), reference
        except RayTaskError as error:
            raise RuntimeError(f"the verifier failed: {_why(error)}") from error
        except _LOST as error:
            raise PeerLost(_why(error)) from error


def _why(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"
