"""The actors that hold a device: DrafterActor and VerifierRank. Each is made, watched and replaced by its Serve replica.

Heavy imports stay inside the methods: a replica imports this module to make the actor and must stay light (no torch).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ray

from ddtree.deployments.device_thread import DeviceThread

if TYPE_CHECKING:
    from ddtree.deployments.config import AppConfig
    from ddtree.deployments.models import Models
    from ddtree.drafter.drafter import Drafter
    from ddtree.drafter.items import Candidates, DraftItem
    from ddtree.verifier.batch import VerifyResult
    from ddtree.verifier.target import Target


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class DrafterActor:
    """Runs the DFlash forward and owns the context cache of its sequences."""

    def __init__(self, config: AppConfig, models: Models) -> None:
        from ddtree.deployments import shm_transport

        shm_transport.register()
        self._thread = DeviceThread()
        self._drafter = self._thread.run(_load_drafter, config, models)

    def ping(self) -> bool:
        return True

    def pid(self) -> int:
        return os.getpid()

    def draft(self, items: list[DraftItem], verified: VerifyResult | None) -> Candidates:
        """Feed the items' new context rows and draft for those with a bonus. Returned as an RDT object."""
        return self._thread.run(self._drafter.draft, items, [verified.features] if verified else [])

    def release(self, sequences: list[str]) -> None:
        self._thread.run(self._drafter.release, sequences)


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class VerifierRank:
    """Runs the target forward and owns this rank's part of the KV pool."""

    def __init__(self, config: AppConfig, models: Models) -> None:
        from ddtree.deployments import shm_transport, wire

        shm_transport.register()
        self._loads = wire.loads
        self._thread = DeviceThread()
        self._target = self._thread.run(_load_target, config, models)

    def ping(self) -> bool:
        return True

    def step(self, batch: bytes) -> VerifyResult:
        """One verify step over a VerifyBatch in wire form. Returned as an RDT object."""
        return self._thread.run(self._target.step, self._loads(batch))


def _load_drafter(config: AppConfig, models: Models) -> Drafter:
    import torch

    from ddtree.drafter.drafter import Drafter
    from ddtree.verifier.dtype import choose_dtype

    device, dtype = config.drafter.device, config.drafter.dtype
    assert models.drafter_dir is not None, "a drafter actor is only made where there is a checkpoint"
    return Drafter(
        models.drafter_dir,
        models.target.model_dir,
        device=device,
        dtype=choose_dtype(device) if dtype == "auto" else getattr(torch, dtype),
        top_k=config.tree.top_k,
        threads=config.drafter.threads,
    )


def _load_target(config: AppConfig, models: Models) -> Target:
    from ddtree.verifier.backends import load_target

    return load_target(
        config.verifier.backend,
        str(models.target.model_dir),
        dtype=config.target.dtype,
        device=config.verifier.device,
        page_size=config.verifier.page_size,
        pages=config.verifier.kv_tokens // config.verifier.page_size,
        feature_layers=models.feature_layers,
        threads=config.verifier.threads,
    )


def make(actor_class: Any, *args: Any) -> ray.actor.ActorHandle:
    """Create an actor. The caller owns it: it dies with the caller."""
    handle: ray.actor.ActorHandle = actor_class.remote(*args)
    return handle
