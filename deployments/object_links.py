"""Peers over Ray calls with deadlines, and every way they fail turned into PeerLost.

Results stay where they are made, as Ray Direct Transport objects that each receiver reads: candidates by the router, features
by the drafters. Arguments are a few kilobytes and travel inside the call. What crosses to another node is an ordinary object.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import RayTaskError

from ddtree.deployments import node_transport, wire
from ddtree.deployments.mailbox import Letter
from ddtree.deployments.peers import LOST, Verified, lose, why
from ddtree.deployments.round_loop import PeerLost
from ddtree.drafter.items import Candidates, DraftItem
from ddtree.verifier.batch import VerifyBatch, VerifyResult
from ddtree.verifier.transfer import to_device


class ObjectDrafter:
    """A DrafterActor. `start` and `result` come in turn."""

    def __init__(self, drafter_id: str, actor: ActorHandle, mapped: bool, timeout_s: float) -> None:
        """`mapped`: it and the router can map each other's memory."""
        self.id = drafter_id
        self._actor, self._mapped, self._timeout = actor, mapped, timeout_s
        self._draft = actor.draft.options(tensor_transport=node_transport.NAME) if mapped else actor.draft
        self._pending: Any = None

    def start(self, items: list[DraftItem], features: Verified | None) -> None:
        """Begin a draft. `features` are of the verify result whose rows the items name."""
        try:
            self._pending = self._draft.remote(items, features and self._readable(features), not self._mapped)
        except LOST as error:
            raise PeerLost(why(error)) from error

    def result(self) -> Candidates:
        try:
            candidates: Candidates = ray.get(self._pending, timeout=self._timeout)
        except LOST as error:
            raise PeerLost(why(error)) from error
        finally:
            self._pending = None
        return candidates

    def release(self, sequences: list[str]) -> None:
        """Forget sequences; nobody waits for it."""
        self._actor.release.remote(sequences)

    def _readable(self, features: Verified) -> Any:
        """The reference where this drafter can read what it names, else the result itself."""
        if isinstance(features.reference, Letter) or (features.mapped and not self._mapped):
            return to_device(features.result, torch.device("cpu"))
        return features.reference


class ObjectVerifier:
    """The verifier group. Every rank takes the step, the first one says what came of it. `start` and `result` come in turn."""

    def __init__(self, ranks: Sequence[ActorHandle], mapped: bool, timeout_s: float) -> None:
        """`mapped`: the router can map their memory."""
        self._ranks = ranks
        first, *self._others = ranks
        self._step = first.step.options(tensor_transport=node_transport.NAME) if mapped else first.step
        self._mapped, self._timeout = mapped, timeout_s
        self._pending: tuple[Any, list[Any], float]

    def room(self) -> None:
        """Batches are copied."""

    def announce(self, batch: VerifyBatch) -> None:
        """Without room nothing is."""

    def start(self, batch: VerifyBatch) -> None:
        """Raises PeerLost."""
        data = wire.dumps(batch)
        try:
            reference = self._step.remote(data, not self._mapped)
            self._pending = reference, [rank.follow.remote(data) for rank in self._others], time.monotonic()
        except LOST as error:
            raise lose(self._ranks, error) from error

    def result(self) -> tuple[VerifyResult, Verified]:
        """Raises PeerLost, and RuntimeError where all ranks live but the step failed: trying again would not help."""
        reference, others, begun = self._pending
        try:
            result: VerifyResult = _first(reference, others, begun + self._timeout)
        except RayTaskError as error:
            raise RuntimeError(f"the verifier failed: {why(error)}") from error
        except LOST as error:
            raise lose(self._ranks, error) from error
        return result, Verified(result, reference, mapped=self._mapped)


def _first(reference: Any, others: list[Any], deadline: float) -> Any:
    """The value of `reference` once all are done. Raises what the first to fail raises, without waiting for the others."""
    values, waiting = {}, [reference, *others]
    while waiting:
        done, waiting = ray.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            raise TimeoutError("no answer in time")
        values.update({ref: ray.get(ref) for ref in done})
    return values[reference]
