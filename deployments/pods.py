"""Pods: how many a Serve config file asks for, which of them a drafter belongs to, the figures of all. Knows no Ray.

A pod is a Router replica, the one Verifier replica that it has claimed, and the drafters that registered with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ddtree.deployments.errors import ConfigError

OF_EACH = (
    "verifier_connected",
    "running",
    "waiting",
    "drafters",
    "generated_tokens",
)  # figures that /health shows of every pod


@dataclass(frozen=True)
class Pod:
    """A pod as a drafter sees it. Written by its Router replica."""

    number: int  # 0 … pods-1; another router may have it later
    node: str  # Ray's id of the node
    router: Any  # handle of the RouterActor


def home(pods: Sequence[Pod], number: int, node: str) -> Pod | None:
    """The pod of a drafter: its number among drafters says which, of those on its own node where there are any."""
    near = sorted([pod for pod in pods if pod.node == node] or pods, key=lambda pod: pod.number)
    return near[number % len(near)] if near else None


def together(pods: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of several pods as those of one: numbers are added, lists joined. What each has to do is beside them, as `pods`."""
    whole: dict[str, Any] = {}
    for name, value in pods[0].items():
        values = [pod[name] for pod in pods]
        if isinstance(value, bool):
            whole[name] = any(values)
        elif isinstance(value, int):
            whole[name] = sum(values)
        elif isinstance(value, list):
            whole[name] = sorted(chain.from_iterable(values))
        else:
            whole[name] = value
    pages = [pod["kv_pages"] for pod in pods]
    whole["kv_pages"] = pages[0] | {name: sum(p[name] for p in pages) for name in ("total", "free", "kept")}
    return whole | {"pods": [{name: pod[name] for name in OF_EACH} for pod in pods]}


def user_config(document: Mapping[str, Any], deployment: str) -> Any:
    """What a Serve config file says as `user_config` of a deployment of its only application."""
    options = document["applications"][0].get("deployments") or []
    return next((one.get("user_config") for one in options if one["name"] == deployment), None)


def count(document: Mapping[str, Any], source: str, drafting: bool = True) -> int:
    """Pods that the only application of a Serve config file asks for. Raises ConfigError where its deployments do not agree.
    `drafting`: there is a Drafter deployment, and each pod wants one."""
    replicas: dict[str, int] = {}
    for deployment in document["applications"][0].get("deployments") or []:
        name, number, scaling = deployment["name"], deployment.get("num_replicas"), deployment.get("autoscaling_config")
        scales = bool(scaling) or number == "auto"
        if scales and name in ("Router", "Verifier"):
            raise ConfigError(f"{source}: {name} is to autoscale; pods do not scale by themselves, drafters do")
        replicas[name] = (scaling or {}).get("min_replicas", 1) if scales else number or 1
    pods, verifiers = replicas.get("Router", 1), replicas.get("Verifier", 1)
    if verifiers != pods:
        raise ConfigError(
            f"{source}: num_replicas of Router ({pods}) and Verifier ({verifiers}) differ; a pod has one of each, so give both "
            "the same"
        )
    if drafting and (drafters := replicas.get("Drafter", 1)) < pods:
        raise ConfigError(
            f"{source}: {drafters} drafters for {pods} pods; a drafter serves one pod, so give Drafter a num_replicas (or "
            f"min_replicas) of {pods} or more"
        )
    return pods
