"""The devices of this machine, and memory that does not look written. Knows no operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
on_devices = pytest.mark.parametrize("device", DEVICES)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives tensors full of the largest value, so that what a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
