"""The drafters of a running service: their number is changed as `serve deploy` does it, and watched. Knows no streams."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import httpx

from ddtree.deployments.commands.client import get_json

from ..serving.service import Failed

# Ray takes another port where 8265 is taken, and says so on the terminal, with colours.
DASHBOARD = re.compile(r"View the dashboard at .*?(https?://[\w.:\[\]-]+)")
HEALTH_S = 20  # an ingress waits 15 s for a router
REACH_S = 300.0  # weights load while all cores, or the GPU, have other work


class NotReached(RuntimeError):
    """The drafters that were asked for did not come, or did not go."""


def with_drafters(document: dict[str, Any], number: int) -> dict[str, Any]:
    """A Serve config document of one application with so many drafters, however many it has."""
    (application,) = document["applications"]
    deployments = {options["name"]: options for options in application.get("deployments") or []}
    drafter = deployments.get("Drafter", {"name": "Drafter"}) | {"num_replicas": number}
    drafter.pop("autoscaling_config", None)
    deployments["Drafter"] = drafter
    return document | {"applications": [application | {"deployments": [*deployments.values()]}]}


class Drafters:
    """`ask` for a number, then `look` until they are there."""

    def __init__(self, url: str, document: dict[str, Any], log: Path) -> None:
        """`document` is what is served at `url`, and `log` the service's output. Raises Failed where that does not say where to
        deploy, RuntimeError or OSError where nobody is there."""
        dashboard = DASHBOARD.search(log.read_text(encoding="utf-8", errors="replace"))
        if dashboard is None:
            raise Failed("the service has no dashboard, and it is there that another number is deployed", log)
        http = document.get("http_options", {}) | {"port": httpx.URL(url).port}
        self._document, self._serve = document | {"http_options": http}, _serve(dashboard[1])
        self._client = httpx.Client(base_url=url, timeout=HEALTH_S)
        self.seen: list[tuple[float, int]] = []  # when (seconds, monotonic) their number was seen to be another one

    def ask(self, number: int) -> None:
        """Raises RuntimeError or OSError where Serve does not take it."""
        self._serve.deploy_applications(with_drafters(self._document, number))

    def look(self) -> dict[str, Any]:
        """The service's `/health`. Raises ServerError."""
        health = get_json(self._client, "/health")
        number = len(health["drafters"])
        if not self.seen or self.seen[-1][1] != number:
            self.seen.append((time.monotonic(), number))
        return health

    def reached(self, number: int, asked: float) -> bool:
        """Whether there are so many. Raises NotReached once they were asked for too long ago, and what `look` raises."""
        if time.monotonic() - asked > REACH_S:
            raise NotReached(f"{self.seen[-1][1]} of {number} drafters after {REACH_S:.0f} s")
        return len(self.look()["drafters"]) == number


def _serve(dashboard: str) -> Any:
    """A client of Serve's REST API. A cluster that a service starts wants Ray's token, and Ray reads only once, when it is
    imported, whether to send it."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

    return ServeSubmissionClient(dashboard)
