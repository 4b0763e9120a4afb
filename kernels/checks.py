"""Argument checks shared by the public operations. Knows nothing of what the tensors mean.

Only metadata is read (never values), so a check costs about a microsecond and never waits for a device.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check(
    name: str,
    value: Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None,
) -> None:
    """Raises ValueError unless `value` has this shape (None: any size), one of these dtypes, and this device (None: any)."""
    actual = value.shape
    if len(actual) != len(shape) or any(w is not None and w != a for a, w in zip(actual, shape, strict=True)):
        wanted = ", ".join("any" if w is None else str(w) for w in shape)
        raise ValueError(f"{name} has shape {list(actual)}; pass [{wanted}].")
    if value.dtype not in dtypes:
        raise ValueError(f"{name} is {value.dtype}; pass {' or '.join(str(d) for d in dtypes)}.")
    if device is not None and value.device != device:
        raise ValueError(f"{name} is on {value.device}; move it to {device}, where the other tensors are.")


def check_int32(name: str, value: Tensor, shape: tuple[int | None, ...], device: torch.device | None) -> None:
    check(name, value, shape, (torch.int32,), device)


def check_reachable(
    name: str, value: Tensor, shape: tuple[int | None, ...], device: torch.device, dtype: torch.dtype = torch.int32
) -> None:
    """As `check`, but what a GPU uses may also lie in pinned host memory, contiguous: it gets there by itself."""
    pinned = value.device != device and device.type == "cuda" and value.is_pinned() and value.is_contiguous()
    check(name, value, shape, (dtype,), None if pinned else device)


def check_slots(name: str, cache: Tensor, pages_dim: int, page_size: int) -> None:
    """Raises ValueError unless dimensions pages_dim and pages_dim + 1, [pages, page_size], can be viewed as one."""
    if cache.stride(pages_dim) != page_size * cache.stride(pages_dim + 1) and cache.shape[pages_dim] > 1:
        raise ValueError(f"{name} is not contiguous over pages and slots; lay it out as […, pages, page_size, …].")
