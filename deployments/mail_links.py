"""Peers on the router's node: letters through a channel, tensors in outboxes that each side mapped when they met.

Every way a peer fails is turned into PeerLost.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import ray
import torch
from ray.actor import ActorHandle

from ddtree.deployments import node_transport
from ddtree.deployments.channel import Caller, CallFailed, results
from ddtree.deployments.desk import ANNOUNCE
from ddtree.deployments.mailbox import Inbox, Letter, Outbox, StaleMessage
from ddtree.deployments.peers import LOST, Verified, lose, why
from ddtree.deployments.round_loop import PeerLost
from ddtree.drafter.items import Candidates, DraftItem, packed
from ddtree.kernels.tree import Allocate
from ddtree.verifier.batch import VerifyBatch, VerifyResult


class Line:
    """Calls to a device actor, whose outbox is mapped here."""

    def __init__(self, actor: ActorHandle, timeout_s: float) -> None:
        self.outbox = actor.outbox.options(tensor_transport=node_transport.NAME).remote()  # for others to map, too
        self.caller = Caller(ray.get(actor.address.remote(), timeout=timeout_s), timeout_s)
        self.inbox = Inbox(ray.get(self.outbox, timeout=timeout_s))
        self._actor, self._timeout = actor, timeout_s

    def introduce(self, role: str, outbox: Any) -> None:
        """Have the actor map the outbox of its peer in this role; `outbox` is a reference to the arena."""
        ray.get(self._actor.introduce.remote(role, outbox), timeout=self._timeout)


class MailDrafter:
    """A DrafterActor. `start` and `result` come in turn."""

    def __init__(self, drafter_id: str, actor: ActorHandle, timeout_s: float) -> None:
        self.id = drafter_id
        self._actor, self._line = actor, Line(actor, timeout_s)
        self._verifier: Any = None  # the outbox that the actor reads features from

    def start(self, items: list[DraftItem], features: Verified | None) -> None:
        """Begin a draft. `features` are of the verify result whose rows the items name."""
        try:
            if features and features.outbox is not self._verifier:
                self._line.introduce("verifier", features.outbox)
                self._verifier = features.outbox
            self._line.caller.start("draft", packed(items), features and features.reference)
        except LOST as error:
            raise PeerLost(why(error)) from error

    def result(self) -> Candidates:
        """Views of the drafter's outbox, until the second draft after this one."""
        try:
            candidates: Candidates = self._line.inbox.read(self._line.caller.result())
        except (*LOST, CallFailed, StaleMessage) as error:
            raise PeerLost(why(error)) from error
        return candidates

    def release(self, sequences: list[str]) -> None:
        """Forget sequences; nobody waits for it."""
        self._actor.release.remote(sequences)


class MailVerifier:
    """The verifier group. Every rank takes the step, the first one says what came of it. `start` and `result` come in turn."""

    def __init__(self, ranks: Sequence[ActorHandle], outbox: Outbox, arena: Any, timeout_s: float) -> None:
        """`outbox` is the router's own, `arena` Ray's reference to its arena."""
        self._outbox, self._ranks = outbox, ranks
        self._lines = [Line(rank, timeout_s) for rank in ranks]
        for line in self._lines:
            line.introduce("router", arena)

    def room(self) -> Allocate | None:
        """The outbox, where that is on a GPU."""
        self._outbox.discard()  # what a round reserved that came to nothing
        return partial(self._outbox.empty, dtype=torch.int32) if self._outbox.arena.data.is_cuda else None

    def announce(self, batch: VerifyBatch) -> None:
        """One who is gone is missed at the start."""
        letter = self._outbox.announce(batch)
        with suppress(*LOST):
            for line in self._lines:
                line.caller.notify(ANNOUNCE, letter)

    def start(self, batch: VerifyBatch) -> None:
        """Raises PeerLost."""
        letter = self._outbox.write(batch)
        try:
            for i, line in enumerate(self._lines):
                line.caller.start("follow" if i else "step", letter)
        except LOST as error:
            raise lose(self._ranks, error) from error

    def result(self) -> tuple[VerifyResult, Verified]:
        """Raises PeerLost, and RuntimeError where all ranks live but the step failed: trying again would not help."""
        first = self._lines[0]
        try:
            answer: Letter = results([line.caller for line in self._lines])[0]
            result: VerifyResult = first.inbox.read(answer)
        except CallFailed as error:
            raise RuntimeError(f"the verifier failed: {why(error)}") from error
        except LOST as error:
            raise lose(self._ranks, error) from error
        return result, Verified(result, answer, first.outbox)
