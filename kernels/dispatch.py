"""The one place that chooses an implementation by device. Knows the implementations, not the operations."""

from __future__ import annotations

import logging
from functools import cache
from types import ModuleType

import torch

from ddtree.kernels import build, cuda, reference

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
    """The CUDA library, compiled on first use; where that is impossible the reference, which accepts CUDA tensors."""
    try:
        cuda.library()
    except (build.BuildError, OSError) as error:
        log.warning("No CUDA kernel library, so the reference runs on CUDA tensors, which is slow. %s", error)
        return reference
    return cuda
