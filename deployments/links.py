"""The router's way to its peers: which transport reaches whom. Knows Ray and nodes, nothing of trees or requests.

The verifier decides: on the router's node `mailbox`, elsewhere `objects` for all. A drafter on another node than the router, or
on another kind of device than the verifier, can map nothing there; it gets features by value.
"""

from __future__ import annotations

from collections.abc import Sequence

import ray
from ray.actor import ActorHandle

from ddtree.deployments import node_transport
from ddtree.deployments.bounds import of_router
from ddtree.deployments.config import AppConfig
from ddtree.deployments.errors import ConfigError
from ddtree.deployments.mail_links import MailDrafter, MailVerifier
from ddtree.deployments.mailbox import Outbox
from ddtree.deployments.models import Models
from ddtree.deployments.object_links import ObjectDrafter, ObjectVerifier
from ddtree.deployments.round_loop import DrafterPeer, VerifierPeer


class Links:
    """Makes the router's peers. Every method waits for the actor, up to the peer's deadline, and raises what Ray raises."""

    def __init__(self, config: AppConfig, models: Models) -> None:
        """Called in the router's actor, whose outbox is made here."""
        node_transport.register()
        self._config = config
        self._node = ray.get_runtime_context().get_node_id()
        self._outbox: Outbox | None = None
        if config.transport != "objects":
            self._outbox = Outbox(config.verifier.device, of_router(config, models))
            self._arena = ray.put(self._outbox.arena, _tensor_transport=node_transport.NAME)
        self._mail = self._outbox is not None  # until a verifier turns out to be on another node

    @property
    def transport(self) -> str:
        """What the verifier is reached by."""
        return "mailbox" if self._mail else "objects"

    def verifier(self, ranks: Sequence[ActorHandle]) -> VerifierPeer:
        """`ranks` of one group, which are on one node."""
        timeout_s = self._config.verifier.timeout_s
        near = self.near(ranks[0], timeout_s)
        self._mail = self._outbox is not None and near
        if self._outbox and near:
            return MailVerifier(ranks, self._outbox, self._arena, timeout_s)
        if self._config.transport == "mailbox":
            raise ConfigError("transport mailbox needs router and verifier on one node, and they are not; use auto")
        return ObjectVerifier(ranks, near, timeout_s)

    def drafter(self, drafter_id: str, actor: ActorHandle) -> DrafterPeer:
        """The drafter then holds no context: what it had was for a router that is gone, or for this one before it forgot it."""
        timeout_s = self._config.drafter.timeout_s
        ray.get(actor.release.remote(None), timeout=timeout_s)
        mapped = self._config.drafter.device == self._config.verifier.device and self.near(actor, timeout_s)
        if self._mail and mapped:
            return MailDrafter(drafter_id, actor, timeout_s)
        return ObjectDrafter(drafter_id, actor, mapped, timeout_s)

    def near(self, actor: ActorHandle, timeout_s: float) -> bool:
        """Whether an actor is on this node."""
        node: str = ray.get(actor.node.remote(), timeout=timeout_s)
        return node == self._node
