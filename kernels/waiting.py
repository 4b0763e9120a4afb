"""Finding out whether code waits for the GPU, which a CUDA graph cannot hold. Knows no operation."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class WaitsForDevice(RuntimeError):
    """The code inside `never_waiting` waited for the GPU."""


@contextmanager
def never_waiting() -> Iterator[None]:
    """What would wait for the GPU raises WaitsForDevice. Does nothing where no GPU is in use."""
    if not torch.cuda.is_initialized():
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise WaitsForDevice(str(error)) from error
    finally:
        torch.cuda.set_sync_debug_mode(mode)
