"""Drafter: the Serve deployment that owns one drafter actor per replica and tells a router of it. Imports no torch.

`num_replicas` and autoscaling need nothing else: a replica registers with the router of its pod when it is healthy, and again at
every health check (so that a router that forgot it, or is new, learns of it), and reports its load. Before it leaves, or goes to
another pod because their number changed, it waits until others have its sequences.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from ddtree.deployments.autoscaling import LoadMeter
from ddtree.deployments.config import AppConfig
from ddtree.deployments.device_actors import DrafterActor, make
from ddtree.deployments.models import Models
from ddtree.deployments.pods import Pod, home

log = logging.getLogger(__name__)
PING_S = 30
ROUTER_S = 30  # a router answers within this, unless it is gone
PODS_S = 5  # so long all routers together may take to say who they are
HANDOVER_S = 5  # a sequence takes a round, as long as prompts leave rows for it


@serve.deployment(
    name="Drafter",
    ray_actor_options={"num_cpus": 0},
    health_check_period_s=2,
    health_check_timeout_s=PING_S + PODS_S + HANDOVER_S + ROUTER_S + 5,
    graceful_shutdown_wait_loop_s=0.1,
    graceful_shutdown_timeout_s=HANDOVER_S + 1,
)
class Drafter:
    """One replica is one drafter."""

    async def __init__(self, config: AppConfig, models: Models, router: DeploymentHandle) -> None:  # type: ignore[misc]  # Serve awaits it
        self._config, self._routers = config, router
        self._id = serve.get_replica_context().replica_id.unique_id
        self._router: Any = None  # the RouterActor of its pod
        self._leaving = False
        self._meter = LoadMeter()
        self._actor: Any = make(DrafterActor, config, models, num_gpus=config.drafter.num_gpus)
        await self._actor.ping.remote()  # once it has loaded; one that cannot fails the deployment, with its reason
        await self._register()

    async def pid(self) -> int:
        """Process id of the actor, for operators and tests that kill it."""
        return int(await self._actor.pid.remote())

    async def check_health(self) -> None:
        """Raises when the actor hangs. When it is dead this process ends: Serve replaces a replica that died at once, one that
        says it is unhealthy only when it has said so three times."""
        try:
            await asyncio.wait_for(self._actor.ping.remote(), PING_S)
        except RayActorError as error:
            log.warning("the drafter is lost, and its replica with it: %s", error)
            os._exit(1)
        await self._register()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's autoscaler goes by. Raises when the actor is dead or hangs; Serve logs it and asks again."""
        return self._meter.report(*await asyncio.wait_for(self._actor.load.remote(), PING_S))

    async def _register(self) -> None:
        """Tell the router of its pod, if there is one: the next health check tells it again. Raises when the actor does not
        answer it."""
        pod = await self._home()
        if self._leaving or pod is None:
            return
        if self._router is not None and self._router != pod.router:
            await self._leave()
        self._router = pod.router
        try:
            await asyncio.wait_for(self._router.register_drafter.remote(self._id, self._actor), ROUTER_S)
        except (RayActorError, TimeoutError) as error:
            if isinstance(error, RayTaskError):  # the router lives: it says that the actor does not
                raise

    async def _home(self) -> Pod | None:
        """The pod to draft for; none while no router is ready."""
        asked = self._routers.broadcast("pod", self._config)
        try:
            answers = await asked.results_async(timeout_s=PODS_S, return_exceptions=True)
        except (DeploymentUnavailableError, TimeoutError):
            return None
        pods = [answer for answer in answers if isinstance(answer, Pod)]
        return home(pods, serve.get_replica_context().rank.rank, ray.get_runtime_context().get_node_id())

    async def _leave(self) -> None:
        """Returns when others have its sequences, or in any case in time."""
        with contextlib.suppress(Exception):  # the router may be gone before us
            await asyncio.wait_for(self._router.deregister_drafter.remote(self._id), HANDOVER_S)

    async def __del__(self) -> None:
        self._leaving = True
        if self._router is not None:
            await self._leave()
