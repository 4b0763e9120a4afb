"""Pods over a tiny model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from benchmarks import pod
from benchmarks.pod import Pod
from ddtree.deployments.config import AppConfig
from ddtree.deployments.models import Models
from ddtree.drafter.config import DrafterInfo
from ddtree.verifier.model_dir import TargetInfo

from .tiny import make_drafter, make_target

GPUS = 0.08  # of one GPU, which every actor of every pod shares


@ray.remote(num_cpus=0)
class Late:
    """A Verifier deployment whose group is not there before it is told to come."""

    def __init__(self, group: ActorHandle) -> None:
        self._group, self._there = group, asyncio.Event()

    async def come(self) -> None:
        self._there.set()

    async def ranks(self, config: AppConfig, router: ActorHandle) -> bytes:
        await self._there.wait()
        ranks: bytes = await self._group.ranks.remote(config, router)
        return ranks


def start(folder: Path, device: str = "cpu", hidden_size: int = 32, **changes: Any) -> Pod:
    """A pod without drafters. `changes` are sections of the configuration, or single values."""
    target, drafter = make_target(folder / "target", hidden_size), make_drafter(folder / "drafter", hidden_size)
    sections: dict[str, Any] = {
        "target": {"model": str(target), "dtype": "float32"},
        "verifier": {"device": device, "threads": 1, "page_size": 4, "kv_tokens": 2048, "timeout_s": 20},
        "drafter": {
            "checkpoint": str(drafter), "device": device, "num_gpus": GPUS if device == "cuda" else 0, "dtype": "float32",
            "threads": 1, "timeout_s": 5, "rebuild_window": 6,
        },
        "tree": {"budget": 16, "max_budget": 63, "top_k": 48},
        "scheduler": {"max_sequences": 8, "prefill_rows": 32},
    }  # fmt: skip
    for name, value in changes.items():
        sections[name] = {**sections[name], **value} if isinstance(value, dict) else value
    config = AppConfig.parse(sections)
    models = Models(TargetInfo.read(target), "tiny", 512, DrafterInfo.read(drafter), drafter)
    return pod.start(config, models)
