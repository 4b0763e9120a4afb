"""Router: the Serve deployment that owns a RouterActor and passes requests to it. Light: it imports no torch.

It ends with its actor, and Serve makes another of both; their requests are resubmitted by who sent them (router_client.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.handle import DeploymentHandle

from ddtree.deployments.config import ROUTER_GPUS, AppConfig
from ddtree.deployments.device_actors import make
from ddtree.deployments.models import Models
from ddtree.deployments.requests import Delta, GenerationRequest
from ddtree.deployments.router_actor import RouterActor

log = logging.getLogger(__name__)
STATUS_S = 30


@serve.deployment(
    name="Router",
    ray_actor_options={"num_cpus": 0},
    max_ongoing_requests=1000,
    health_check_period_s=1,  # streams stand still until Serve knows of a death
    health_check_timeout_s=STATUS_S + 5,
    graceful_shutdown_timeout_s=5,
)
class Router:
    """One replica is one pod's router."""

    async def __init__(self, config: AppConfig, models: Models, verifier: DeploymentHandle) -> None:  # type: ignore[misc]  # Serve awaits it
        on_gpu = config.verifier.device == "cuda"
        self._actor: Any = make(RouterActor, config, models, verifier, num_gpus=ROUTER_GPUS if on_gpu else 0)
        await self._actor.status.remote()  # an actor that cannot start fails the deployment, with its reason

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Deltas of one request, an empty one first. A caller that goes away cancels it."""
        finished = False
        try:
            with _ends_with_actor():
                async for reference in self._actor.generate.remote(request):
                    delta: Delta = await reference
                    finished = delta.finish_reason is not None
                    yield delta
        finally:
            if not finished:
                self._actor.cancel.remote(request.request_id)

    async def register_drafter(self, drafter_id: str, actor: ActorHandle) -> None:
        with _ends_with_actor():
            await self._actor.register_drafter.remote(drafter_id, actor)

    async def deregister_drafter(self, drafter_id: str) -> None:
        """Returns when its sequences are with other drafters, or have none."""
        with _ends_with_actor():
            await self._actor.deregister_drafter.remote(drafter_id)

    async def pids(self) -> tuple[int, int]:
        """Process ids of the actor and of this replica, for operators and tests that kill one."""
        return int(await self._actor.pid.remote()), os.getpid()

    async def status(self) -> dict[str, Any]:
        """Figures of the pod. Raises when its round loop is stuck."""
        with _ends_with_actor():
            status: dict[str, Any] = await asyncio.wait_for(self._actor.status.remote(), STATUS_S)
            return status

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
