"""Verifier: the Serve deployment that owns the target's rank actors, one for each part of a tensor-parallel target.

A group lives and dies as one: where a rank is lost or out of step the replica ends its ranks and itself, and Serve makes others.
Light: it imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any, NoReturn

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util import get_current_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ddtree.deployments.config import ROUTER_GPUS, AppConfig
from ddtree.deployments.device_actors import VerifierRank, make, pack
from ddtree.deployments.models import Models

log = logging.getLogger(__name__)
LETTERS_S = 1.0  # by then a step that was sent to all ranks has reached them
PING_S = 60  # a rank answers between steps; one long prefill step on a laptop takes seconds
CPU_SHARE = 0.01  # of a rank without a GPU. Ray wants a number; the cores are shared, `verifier.threads` says how many


def placement(config: AppConfig) -> dict[str, Any]:
    """Options of the deployment: a place for every rank, all on one node. Serve makes it with the replica and frees it."""
    verifier, drafter = config.verifier, config.drafter
    on_gpu = verifier.device == "cuda"
    bundles = [{"GPU": 1.0} if on_gpu else {"CPU": CPU_SHARE} for _ in range(verifier.tensor_parallel_size)]
    if on_gpu:  # the rest of the first GPU is the router's and, unless it has one of its own, the drafter's
        shared = drafter.num_gpus if config.drafter.checkpoint is not None and drafter.num_gpus < 1 else 0
        bundles[0] = {"GPU": round(1 - ROUTER_GPUS - shared, 4)}
    return {"placement_group_bundles": bundles, "placement_group_strategy": "STRICT_PACK"}


def make_ranks(config: AppConfig, models: Models, places: PlacementGroup) -> list[Any]:
    """A rank in every place of `placement`, in order, with nothing loaded yet. They die with who calls this."""
    ranks = []
    for i, bundle in enumerate(placement(config)["placement_group_bundles"]):
        place = PlacementGroupSchedulingStrategy(places, placement_group_bundle_index=i)
        share = {"num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}
        ranks.append(make(VerifierRank, config, models, scheduling_strategy=place, **share))
    return ranks


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
        self._config = config
        self._ranks = make_ranks(config, models, get_current_placement_group())
        place = await self._ranks[0].meeting_place.remote()
        # The first error ends the wait for ranks that wait for the one that failed; they die with this replica.
        await asyncio.gather(*(rank.load.remote(i, len(self._ranks), place) for i, rank in enumerate(self._ranks)))

    async def ranks(self, config: AppConfig, router: ActorHandle) -> bytes | None:
        """The ranks in order, all alive and in step; `unpack` them. A router asks every group when it starts, and when it lost
        its own. None where another router has them, or for one of another configuration: either of the two is about to be
        replaced. Else no step is under way, and one that the router before sent to some ranks alone would never end."""
        if config != self._config:
            return None
        try:
            if not await asyncio.wait_for(self._ranks[0].free.remote(router), PING_S):
                return None
            await self.check_health()
        except (TimeoutError, RayActorError) as error:
            self._end(f"a rank does not answer: {error!r}")
        begun = await self._steps()
        if len({*begun}) > 1:
            await asyncio.sleep(LETTERS_S)
            if await self._steps() == begun:
                self._end(f"its ranks are out of step: {begun}")
        return pack(self._ranks)

    async def pids(self) -> list[int]:
        """Process ids of the ranks, for operators and tests that kill one."""
        return list(await asyncio.gather(*(rank.pid.remote() for rank in self._ranks)))

    async def check_health(self) -> None:
        """Raises when a rank hangs. When one is dead this process ends: Serve replaces a replica that died at once, one
        that says it is unhealthy only when it has said so three times."""
        try:
            await asyncio.wait_for(asyncio.gather(*(rank.ping.remote() for rank in self._ranks)), PING_S)
        except RayActorError as error:
            self._end(f"a rank is lost: {error}")

    async def _steps(self) -> list[int]:
        return list(await asyncio.gather(*(rank.steps.remote() for rank in self._ranks)))

    def _end(self, why: str) -> NoReturn:
        log.warning("the group ends, %s", why)
        for rank in self._ranks:
            ray.kill(rank)
        os._exit(1)
