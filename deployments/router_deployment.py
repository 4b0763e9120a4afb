"""Router: the Serve deployment that owns a RouterActor and passes requests to it. Light: it imports no torch.

A replica is ready when it has a verifier: a rolling update replaces one pod after the other. It ends with its actor, and Serve
makes another of both; their requests are resubmitted by who sent them (router_client.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from ddtree.deployments.config import ROUTER_GPUS, AppConfig
from ddtree.deployments.device_actors import make, pack
from ddtree.deployments.errors import NotReady
from ddtree.deployments.lines import Address
from ddtree.deployments.metrics import Snapshot
from ddtree.deployments.models import Models
from ddtree.deployments.pod_choice import CONNECTED
from ddtree.deployments.pods import Pod
from ddtree.deployments.requests import GenerationRequest
from ddtree.deployments.router_actor import RouterActor

log = logging.getLogger(__name__)
STATUS_S = 30


def routing(config: AppConfig) -> dict[str, Any]:
    """Options of the deployment: how Serve chooses the pod for a request."""
    choice = RequestRouterConfig(
        request_router_class="ddtree.deployments.pod_choice:PodChoice",
        request_router_kwargs={"page_size": config.verifier.page_size},
        request_routing_stats_period_s=1,
    )
    return {"request_router_config": choice}


def make_router(config: AppConfig, models: Models, verifier: Any) -> Any:
    """Its actor. `verifier`: the deployment's handle, or what has its `broadcast`."""
    share = ROUTER_GPUS if config.verifier.device == "cuda" else 0
    return make(RouterActor, config, models, verifier, num_gpus=share)


@serve.deployment(
    name="Router",
    ray_actor_options={"num_cpus": 0},
    max_ongoing_requests=1000,
    health_check_period_s=1,  # streams stand still until Serve knows of a death
    health_check_timeout_s=STATUS_S + 5,
    graceful_shutdown_wait_loop_s=0.1,
    graceful_shutdown_timeout_s=2,  # what runs longer is resubmitted; its verifier may be gone already
)
class Router:
    """One replica is one pod's router."""

    async def __init__(self, config: AppConfig, models: Models, verifier: DeploymentHandle) -> None:  # type: ignore[misc]  # Serve awaits it
        self._config, self._max_budget = config, config.tree.max_budget if models.drafter else 0
        self._actor = make_router(config, models, verifier)
        self._address = Address(self._actor._actor_id.hex(), pack([self._actor]))
        await self._actor.ready.remote()  # an actor that cannot start fails the deployment, with its reason

    async def generate(self, request: GenerationRequest, line: str) -> AsyncIterator[Address]:
        """Where the router of a request is; lasts as long as the request, whose deltas go to this line (lines.py). A caller that
        goes away cancels it. Its configuration may be one that is being replaced: raises NotReady where that had another target;
        the budget is cut to what there is room for here."""
        if request.target not in ("", self._config.target.key):
            raise NotReady("another target is served now: send the request again")
        request = replace(request, budget=min(request.budget, self._max_budget))
        ended = False
        try:
            with _ends_with_actor():
                served = self._actor.serve.remote(request, line)
                yield self._address
                await served
                ended = True
        finally:
            if not ended:
                self._actor.cancel.remote(request.request_id)

    async def pod(self, config: AppConfig) -> Pod | None:
        """For drafters. None for one of another configuration: either of the two is about to be replaced."""
        number, node = serve.get_replica_context().rank.rank, ray.get_runtime_context().get_node_id()
        return Pod(number, node, self._actor) if config == self._config else None

    async def pids(self) -> tuple[int, int]:
        """Process ids of the actor and of this replica, for operators and tests that kill one."""
        return int(await self._actor.pid.remote()), os.getpid()

    async def status(self, timeout_s: float = STATUS_S) -> dict[str, Any]:
        """Figures of the pod. Raises when its round loop is stuck."""
        with _ends_with_actor():
            status: dict[str, Any] = await asyncio.wait_for(self._actor.status.remote(), timeout_s)
            return status

    async def metrics(self, timeout_s: float = STATUS_S) -> Snapshot:
        """What `/metrics` shows of the pod."""
        with _ends_with_actor():
            number = serve.get_replica_context().rank.rank
            snapshot: Snapshot = await asyncio.wait_for(self._actor.metrics.remote(number), timeout_s)
            return snapshot

    async def record_routing_stats(self) -> dict[str, Any]:
        """What Serve tells those who choose a pod (pod_choice.py)."""
        return {CONNECTED: (await self.status())[CONNECTED]}

    async def check_health(self) -> None:
        await self.status()


@contextmanager
def _ends_with_actor() -> Iterator[None]:
    """End this process where a call finds the actor dead: Serve replaces a replica that died at once, one that says it is
    unhealthy only when it has said so three times."""
    try:
        yield
    except RayActorError as error:
        if isinstance(error, RayTaskError):  # the actor lives: it says that another one does not
            raise
        log.warning("the router is lost, and its replica with it: %s", error)
        os._exit(1)
