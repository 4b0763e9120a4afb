"""The one place that chooses an implementation by device. Knows the implementations, not the operations."""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

import torch

from ddtree.kernels import reference

log = logging.getLogger(__name__)


def implementation(device: torch.device) -> ModuleType:
    """Returns the module that holds every operation for tensors on `device`.

    Raises ValueError for a device type that has no implementation.
    """
    if device.type == "cpu":
        return reference
    if device.type == "cuda":
        return _cuda()
    raise ValueError(f"No kernels for device type {device.type!r}; move the tensors to one of: cpu, cuda.")


@cache  # also what makes the message appear once
def _cuda() -> ModuleType:
    """The CUDA library's loader plugs in here."""
    log.warning("No CUDA kernel library: ddtree.kernels runs its reference on CUDA tensors, which is slow.")
    return reference
