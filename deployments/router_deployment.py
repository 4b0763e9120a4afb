"""Router: the Serve deployment that owns a RouterActor and passes requests to it. Light: it imports no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.actor import ActorHandle
from ray.serve.handle import DeploymentHandle

from ddtree.deployments.config import ROUTER_GPUS, AppConfig
from ddtree.deployments.device_actors import make
from ddtree.deployments.models import Models
from ddtree.deployments.requests import Delta, GenerationRequest
from ddtree.deployments.router_actor import RouterActor

STATUS_S = 30


@serve.deployment(
    name="Router",
    ray_actor_options={"num_cpus": 0},
    max_ongoing_requests=1000,
    health_check_period_s=5,
    health_check_timeout_s=STATUS_S + 5,
    graceful_shutdown_timeout_s=5,
)
class Router:
    """One replica is one pod's router."""

    def __init__(self, config: AppConfig, models: Models, verifier: DeploymentHandle) -> None:
        on_gpu = config.verifier.device == "cuda"
        self._actor: Any = make(RouterActor, config, models, verifier, num_gpus=ROUTER_GPUS if on_gpu else 0)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Deltas of one request. A caller that goes away cancels it."""
        finished = False
        try:
            async for reference in self._actor.generate.remote(request):
                delta: Delta = await reference
                finished = delta.finish_reason is not None
                yield delta
        finally:
            if not finished:
                self._actor.cancel.remote(request.request_id)

    async def register_drafter(self, drafter_id: str, actor: ActorHandle) -> None:
        await self._actor.register_drafter.remote(drafter_id, actor)

    async def deregister_drafter(self, drafter_id: str) -> None:
        await self._actor.deregister_drafter.remote(drafter_id)

    async def status(self) -> dict[str, Any]:
        """Figures of the pod. Raises when its round loop is stuck."""
        status: dict[str, Any] = await asyncio.wait_for(self._actor.status.remote(), STATUS_S)
        return status

    async def check_health(self) -> None:
        await self.status()
