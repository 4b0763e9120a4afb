"""The devices of this machine, and memory that does not look written. Knows no operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

import pytest
import torch

from ddtree.kernels import reference
from ddtree.kernels.dispatch import implementation

from .emulation import compiler, emulated

DEVICES = ["cpu", *(["emulated"] if compiler() else []), *(["cuda"] if torch.cuda.is_available() else [])]


def on_devices(test: Callable) -> Callable:
    """Runs a test on each device. "emulated" stands for CPU tensors on which the CUDA sources run: emulation.py."""

    @wraps(test)
    def run(*args: object, device: str, **kwargs: object) -> None:
        if device == "emulated":
            with emulated():
                test(*args, device="cpu", **kwargs)
        else:
            test(*args, device=device, **kwargs)

    return pytest.mark.parametrize("device", DEVICES)(run)


def runs_cuda_sources(device: str) -> bool:
    return implementation(torch.device(device)) is not reference


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives tensors full of the largest value, so that what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
