"""Verifier: the Serve deployment that owns the target's rank actors. Light: it imports no torch."""

from __future__ import annotations

import asyncio
from typing import Any

from ray import serve
from ray.actor import ActorHandle

from ddtree.deployments.config import AppConfig
from ddtree.deployments.device_actors import VerifierRank, make
from ddtree.deployments.models import Models

PING_S = 60  # a rank answers between steps; one long prefill step on a laptop takes seconds


@serve.deployment(
    name="Verifier",
    ray_actor_options={"num_cpus": 0},
    health_check_period_s=5,
    health_check_timeout_s=PING_S + 5,
    graceful_shutdown_timeout_s=5,
)
class Verifier:
    """One replica is one verifier group."""

    async def __init__(self, config: AppConfig, models: Models) -> None:  # type: ignore[misc]  # Serve awaits it
        self._rank: Any = make(VerifierRank, config, models)
        await self._rank.ping.remote()  # the weights are loaded

    async def rank(self) -> ActorHandle:
        """The group's first rank, which the router talks to."""
        return self._rank

    async def check_health(self) -> None:
        """Raises when a rank is dead or hangs; Serve then replaces the group."""
        await asyncio.wait_for(self._rank.ping.remote(), PING_S)
