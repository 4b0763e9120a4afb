"""Kills processes of a service and watches it recover. Knows processes and `/health`; nothing of streams."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from ddtree.deployments.commands.client import ServerError, get_json

from .processes import KINDS, find

POLL_S = 0.1
HEALTH_S = 20  # an ingress waits 15 s for a router
RECOVERY_S = 120


class NotRecovered(RuntimeError):
    """The service did not become whole again."""


@dataclass
class Kill:
    """One `kill -9`. Times are seconds, monotonic."""

    kind: str
    pid: int
    at: float
    alone: bool = True  # the service was whole before, and no other process was killed until it was whole again
    recovered: float | None = None  # when it was


class Monkey:
    """`strike` and `recover` in any order."""

    def __init__(self, url: str, root: int, seed: int) -> None:
        """`root`: a process whose descendants the service's processes are. The service is whole now."""
        self.kills: list[Kill] = []
        self.whole = {kind: len(pids) for kind, pids in find(root).items()}  # processes of each kind when nothing fails
        self.seen: set[int] = set()  # ids of all processes that there ever were
        self._random, self._root = random.Random(seed), root
        self._client = httpx.Client(base_url=url, timeout=HEALTH_S)

    def turns(self) -> Iterator[str]:
        """Kinds at random, each as often as the others."""
        while True:
            yield from self._random.sample(KINDS, len(KINDS))

    def pause(self, most: float) -> None:
        time.sleep(self._random.uniform(0, most))

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def strike(self, kind: str) -> Kill:
        """Kill a process of a kind, once there is one. Raises NotRecovered where none comes."""
        deadline = time.monotonic() + RECOVERY_S
        while True:
            if pids := sorted(self.find()[kind]):
                pid = self._random.choice(pids)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    break
            self._check(deadline, f"no {kind}")
            time.sleep(POLL_S)
        kill = Kill(kind, pid, time.monotonic())
        for other in self.kills:
            if other.recovered is None:
                other.alone = kill.alone = False
        self.kills.append(kill)
        return kill

    def recover(self, moving_since: Callable[[float], bool] = lambda moment: True) -> None:
        """Wait until nothing of what was killed is missing any more, and until the streams move. Raises NotRecovered."""
        deadline = time.monotonic() + RECOVERY_S
        while what := self._missing():
            self._check(deadline, what)
            time.sleep(POLL_S)
        whole = time.monotonic()
        for kill in self.kills:
            kill.recovered = kill.recovered or whole
        while not moving_since(whole):
            self._check(deadline, "streams stand still")
            time.sleep(POLL_S)

    def health(self) -> dict[str, Any]:
        """Raises ServerError."""
        return get_json(self._client, "/health")

    def _missing(self) -> str | None:
        found, killed = self.find(), {kill.pid for kill in self.kills}
        counts = {kind: len(pids - killed) for kind, pids in found.items()}
        if counts != self.whole:
            return ", ".join(f"{n} of {self.whole[kind]} {kind}" for kind, n in counts.items() if n != self.whole[kind])
        try:
            drafters = len(self.health()["drafters"])
        except ServerError as error:
            return str(error)
        wanted = self.whole["drafter actor"]
        return None if drafters == wanted else f"{drafters} of {wanted} drafters known to the router"

    def find(self) -> dict[str, set[int]]:
        found = find(self._root)
        self.seen.update(*found.values())
        return found

    def _check(self, deadline: float, what: str) -> None:
        if time.monotonic() > deadline:
            raise NotRecovered(f"after {RECOVERY_S} s: {what}")
