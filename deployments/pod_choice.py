"""How Serve sends a request to a Router replica, that is to a pod: by what affinity.py says, and to none without a verifier while
there are others. Runs in every process with a handle.

Serve pickles this module by value. Knows Serve's interface for request routers; the policy is not here.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ddtree.deployments.affinity import Affinity
from ddtree.deployments.requests import GenerationRequest

CONNECTED = "verifier_connected"  # what a Router replica tells Serve of itself, once a second


class PodChoice(FIFOMixin, RequestRouter):  # FIFO: Serve's other way confuses the calls of one HTTP request
    """`request_router_class` of the Router deployment."""

    def initialize_state(self, page_size: int) -> None:
        """Called by Serve with `request_router_kwargs`."""
        self._affinity = Affinity(page_size)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Called by Serve. The chosen replica, then the others for when it takes no more; Serve may call again after a pause."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        if len(candidate_replicas) == 1:
            return [candidate_replicas]
        serving = [replica for replica in candidate_replicas if replica.routing_stats.get(CONNECTED, True)]
        load = await self._load(serving or candidate_replicas)
        chosen = self._affinity.choose(_prompt(pending_request), load) if load else None
        first = [replica for replica in candidate_replicas if replica.replica_id.unique_id == chosen]
        return [first, [replica for replica in candidate_replicas if replica not in first]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Serve."""
        self._affinity.sent(_prompt(pending_request), replica_id.unique_id)

    async def _load(self, replicas: list[RunningReplica]) -> dict[str, int]:
        """Requests that each replica has, of all senders. Those that do not say so in time are left out."""
        known = {replica: self.replica_queue_len_cache.get(replica.replica_id) for replica in replicas}
        asked = await self._probe_queue_lens([replica for replica, load in known.items() if load is None], 0)
        return {r.replica_id.unique_id: load for r, load in {**known, **dict(asked)}.items() if load is not None}


def _prompt(pending_request: PendingRequest | None) -> tuple[int, ...]:
    """Empty for a call that is no request, such as one for figures."""
    args = pending_request.args if pending_request is not None else []
    return next((arg.prompt_ids for arg in args if isinstance(arg, GenerationRequest)), ())
