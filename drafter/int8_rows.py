"""Matrices as int8 rows: `X [out, in]` is int8 with `X_scale [out]` in fp32 beside it. Knows no files and no models.

A quarter of fp32, half of bf16; an element's error is at most half its row's scale, that is 1/254 of the row's largest element.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ddtree.drafter.config import SCALE


def quantise(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every matrix as int8 rows; vectors in fp32."""
    stored = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            stored[name], stored[name + SCALE] = quantise_rows(tensor)
        else:
            stored[name] = tensor.float()
    return stored


def dequantise(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `quantise` was given, in fp32; what is not in int8 stays. Raises ValueError where scales are missing."""
    lacking = [name for name, t in stored.items() if t.dtype == torch.int8 and name + SCALE not in stored]
    if lacking:
        raise ValueError(f"int8 tensors without {SCALE!r} beside them: {some(lacking)}")
    return {
        name: dequantise_rows(tensor, stored[name + SCALE]) if tensor.dtype == torch.int8 else tensor
        for name, tensor in stored.items()
        if not (name.endswith(SCALE) and name.removesuffix(SCALE) in stored)
    }


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight `[out, in]` → int8 `[out, in]` and fp32 scale `[out]`, rounded to nearest, symmetric (−127 … 127)."""
    wide = weight.float()
    scale = wide.abs().amax(1) / 127
    rows = wide / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]  # a row of zeros stays zeros
    return rows.round().to(torch.int8), scale


def dequantise_rows(rows: Tensor, scale: Tensor) -> Tensor:
    """The fp32 weight `[out, in]` of `quantise_rows`' results."""
    return rows.float() * scale.float()[:, None]


def some(names: list[str]) -> str:
    """The first of them, for a message."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
