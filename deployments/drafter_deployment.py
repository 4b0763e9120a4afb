"""Drafter: the Serve deployment that owns one drafter actor per replica and tells the router of it. Imports no torch.

`num_replicas` and autoscaling need nothing else: a replica registers when it is healthy, again at every health check (so that a
router that forgot it, or is new, learns of it), reports its load, and before it leaves waits until others have its sequences.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from ddtree.deployments.autoscaling import LoadMeter
from ddtree.deployments.config import AppConfig
from ddtree.deployments.device_actors import DrafterActor, make
from ddtree.deployments.models import Models

PING_S = 30
HANDOVER_S = 5  # a sequence takes a round, as long as prompts leave rows for it


@serve.deployment(
    name="Drafter",
    ray_actor_options={"num_cpus": 0},
    health_check_period_s=2,
    health_check_timeout_s=PING_S + 5,
    graceful_shutdown_wait_loop_s=0.1,
    graceful_shutdown_timeout_s=HANDOVER_S + 1,
)
class Drafter:
    """One replica is one drafter."""

    async def __init__(self, config: AppConfig, models: Models, router: DeploymentHandle) -> None:  # type: ignore[misc]  # Serve awaits it
        self._router = router
        self._id = serve.get_replica_context().replica_id.unique_id
        self._leaving = False
        self._meter = LoadMeter()
        self._actor: Any = make(DrafterActor, config, models, num_gpus=config.drafter.num_gpus)
        await self._register()

    async def pid(self) -> int:
        """Process id of the actor, for operators and tests that kill it."""
        return int(await self._actor.pid.remote())

    async def check_health(self) -> None:
        """Raises when the actor is dead or hangs; Serve then replaces the replica."""
        await self._register()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve's autoscaler goes by. Raises when the actor is dead or hangs; Serve logs it and asks again."""
        return self._meter.report(*await asyncio.wait_for(self._actor.load.remote(), PING_S))

    async def _register(self) -> None:
        await asyncio.wait_for(self._actor.ping.remote(), PING_S)
        if not self._leaving:
            await self._router.register_drafter.remote(self._id, self._actor)

    async def __del__(self) -> None:
        self._leaving = True
        with contextlib.suppress(Exception):  # the router may be gone before us
            await asyncio.wait_for(self._router.deregister_drafter.remote(self._id), HANDOVER_S)
