"""A router, its verifier group and its drafters as real actors, without Serve and without text."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from ddtree.deployments.config import AppConfig
from ddtree.deployments.device_actors import DrafterActor, make, pack
from ddtree.deployments.models import Models
from ddtree.deployments.requests import Delta, GenerationRequest
from ddtree.deployments.router_deployment import make_router
from ddtree.deployments.verifier_deployment import make_ranks, placement

WAIT_S = 120
PING_S = 3


@ray.remote(num_cpus=0)
class Group:
    """What the Verifier deployment does for its ranks: makes them, and makes them again when one is lost or hangs."""

    def __init__(self, config: AppConfig, models: Models, places: PlacementGroup) -> None:
        self._config, self._models, self._places = config, models, places
        self._make()

    def _make(self) -> None:
        self._ranks = make_ranks(self._config, self._models, self._places)
        place = ray.get(self._ranks[0].meeting_place.remote())
        ray.get([rank.load.remote(i, len(self._ranks), place) for i, rank in enumerate(self._ranks)])

    def pid(self) -> int:
        """Of the first rank."""
        pid: int = ray.get(self._ranks[0].pid.remote())
        return pid

    def compute_seconds(self) -> float:
        """Of the first rank: all take the same steps."""
        seconds: float = ray.get(self._ranks[0].compute_seconds.remote())
        return seconds

    def ranks(self, config: AppConfig, router: ActorHandle) -> bytes:
        try:
            ray.get([rank.ping.remote() for rank in self._ranks], timeout=PING_S)
        except (RayActorError, GetTimeoutError):
            for rank in self._ranks:
                ray.kill(rank)
            self._make()
        return pack(self._ranks)


class Handle:
    """`broadcast(METHOD, ...).results()` over a Group, as a Serve handle has it."""

    def __init__(self, group: ActorHandle) -> None:
        self._group, self._answer = group, None

    def broadcast(self, method: str, *args: Any) -> Handle:
        self._answer = getattr(self._group, method).remote(*args)
        return self

    def results(self, timeout_s: float, return_exceptions: bool) -> list[Any]:
        try:
            return [ray.get(self._answer, timeout=timeout_s)]
        except Exception as error:
            return [error]


@dataclass
class Pod:
    """The actors. They end with `end`, or with the cluster."""

    config: AppConfig
    models: Models
    router: Any
    group: Any
    places: PlacementGroup
    drafters: dict[str, Any] = field(default_factory=dict)

    def replace_router(self) -> None:
        """End the router and make another, which the drafters come to know."""
        ray.kill(self.router)
        self.router = make_router(self.config, self.models, Handle(self.group))
        for name, drafter in self.drafters.items():
            ray.get(self.router.register_drafter.remote(name, drafter), timeout=WAIT_S)
        self.wait(lambda status: status["verifier_connected"] and status["drafters"] == sorted(self.drafters))

    def add_drafter(self) -> Any:
        drafter: Any = make(DrafterActor, self.config, self.models, num_gpus=self.config.drafter.num_gpus)
        name = f"drafter{len(self.drafters)}"
        ray.get(drafter.ping.remote(), timeout=WAIT_S)
        ray.get(self.router.register_drafter.remote(name, drafter), timeout=WAIT_S)
        self.drafters[name] = drafter
        self.wait(lambda status: name in status["drafters"])
        return drafter

    def kill_drafters(self) -> None:
        for drafter in self.drafters.values():
            ray.kill(drafter)
        self.drafters = {}

    def end(self) -> None:
        for actor in (self.router, self.group, *self.drafters.values()):
            ray.kill(actor)  # a group's ranks die with it
        remove_placement_group(self.places)

    def compute_seconds(self) -> dict[str, float]:
        """What the verifier's device has computed, and those of all drafters."""
        drafts = [drafter.compute_seconds.remote() for drafter in self.drafters.values()]
        seconds: list[float] = ray.get([self.group.compute_seconds.remote(), *drafts], timeout=WAIT_S)
        return {"verify": seconds[0], "draft": sum(seconds[1:])}

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = ray.get(self.router.status.remote(), timeout=WAIT_S)
        return status

    def wait(self, until: Callable[[dict[str, Any]], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not until(status := self.status()):
            assert time.monotonic() < deadline, status
            time.sleep(0.05)

    def ask(
        self, request: GenerationRequest, after: Callable[[int], None] = lambda tokens: None
    ) -> tuple[list[int], Delta]:
        """All tokens and the last delta; `after` is called with the number of tokens so far, after each round."""
        tokens: list[int] = []
        line = uuid.uuid4().hex
        served = self.router.serve.remote(request, line)
        for reference in self.router.deltas.remote(line):
            for _, delta in ray.get(reference, timeout=WAIT_S):
                if isinstance(delta, Exception):
                    raise delta
                tokens += delta.token_ids
                after(len(tokens))
            if delta.finish_reason:
                break
        ray.get(served, timeout=WAIT_S)
        return tokens, delta

    def ask_all(self, requests: Sequence[GenerationRequest]) -> list[tuple[list[int], Delta]]:
        """The same for many at once."""
        answers: dict[int, tuple[list[int], Delta]] = {}

        def run(i: int) -> None:
            answers[i] = self.ask(requests[i])

        threads = [threading.Thread(target=run, args=[i]) for i in range(len(requests))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        return [answers[i] for i in range(len(requests))]


def overlapping(config: AppConfig, mode: str) -> AppConfig:
    """The configuration with rounds that overlap so."""
    return config.model_copy(update={"scheduler": config.scheduler.model_copy(update={"overlap": mode})})


def start(config: AppConfig, models: Models) -> Pod:
    """A pod without drafters."""
    wanted = placement(config)
    places = placement_group(wanted["placement_group_bundles"], wanted["placement_group_strategy"])
    group = Group.remote(config, models, places)  # type: ignore[attr-defined]
    pod = Pod(config, models, make_router(config, models, Handle(group)), group, places)
    pod.wait(lambda status: bool(status["verifier_connected"]))
    return pod
