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

from ddtree.deployments.config import AppConfig
from ddtree.deployments.device_actors import DrafterActor, VerifierRank, make, pack
from ddtree.deployments.models import Models
from ddtree.deployments.requests import Delta, GenerationRequest
from ddtree.deployments.router_actor import RouterActor

WAIT_S = 120
PING_S = 3


@ray.remote(num_cpus=0)
class Group:
    """What the Verifier deployment does for its ranks: makes them, and makes them again when they are lost or hang."""

    def __init__(self, config: AppConfig, models: Models) -> None:
        self._config, self._models = config, models
        self._make()

    def _make(self) -> None:
        self._rank: Any = make(VerifierRank, self._config, self._models, num_gpus=self._config.drafter.num_gpus)
        ray.get(self._rank.load.remote(0, 1, ray.get(self._rank.meeting_place.remote())))

    def pid(self) -> int:
        pid: int = ray.get(self._rank.pid.remote())
        return pid

    def compute_seconds(self) -> float:
        seconds: float = ray.get(self._rank.compute_seconds.remote())
        return seconds

    def ranks(self, config: AppConfig, router: ActorHandle) -> bytes:
        try:
            ray.get(self._rank.ping.remote(), timeout=PING_S)
        except (RayActorError, GetTimeoutError):
            ray.kill(self._rank)
            self._make()
        return pack([self._rank])


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
    drafters: dict[str, Any] = field(default_factory=dict)

    def replace_router(self) -> None:
        """End the router and make another, which the drafters come to know."""
        ray.kill(self.router)
        self.router = make_router(self.config, self.models, self.group)
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


def make_router(config: AppConfig, models: Models, group: ActorHandle) -> Any:
    return make(RouterActor, config, models, Handle(group), num_gpus=config.drafter.num_gpus)


def start(config: AppConfig, models: Models) -> Pod:
    """A pod without drafters."""
    group = Group.remote(config, models)  # type: ignore[attr-defined]
    pod = Pod(config, models, make_router(config, models, group), group)
    pod.wait(lambda status: bool(status["verifier_connected"]))
    return pod
