"""Rotary position embedding: full head dimension, half-split, YaRN with its amplitude. Knows no layers."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ddtree.drafter.config import Rope


def rotary_table(positions: Tensor, rope: Rope, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin `[..., 1, head_dim]` for integer positions `[...]`: they broadcast over `[..., heads, head_dim]`.

    The first half of sin is negative, as `rotate` wants it. Computed in fp32 whatever the dtype: bf16 cannot tell
    neighbouring positions apart past 256.
    """
    angles = positions[..., None, None] * _inverse_frequencies(rope, head_dim, positions.device)
    cos, sin = angles.cos(), angles.sin()
    if rope.amplitude != 1.0:
        cos, sin = cos * rope.amplitude, sin * rope.amplitude
    return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """Rotates `x [..., heads, head_dim]`, into `out` if given; element i pairs with element i + head_dim/2."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin, out=out)


@functools.lru_cache(maxsize=32)
def _inverse_frequencies(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """`[head_dim]` fp32, those of `_half_frequencies` negated and then as they are."""
    with torch.inference_mode(False):  # the cached tensor outlives the caller's mode
        half = _half_frequencies(rope, head_dim, device)
        return torch.cat([-half, half])


def _half_frequencies(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """`[head_dim/2]` fp32. YaRN: high frequencies stay, low ones are divided by the factor, a ramp between them."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    if rope.rope_type == "default":
        return plain

    def turns_at(rotations: float) -> float:
        """The (fractional) frequency index that turns `rotations` times over the original positions."""
        wavelengths = math.log(rope.original_max_positions / (rotations * 2 * math.pi))
        return head_dim * wavelengths / (2 * math.log(rope.theta))

    low, high = turns_at(rope.beta_fast), turns_at(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0.0
    ramp = ((torch.arange(head_dim // 2, device=device).float() - low) / (high - low)).clamp(0, 1)
    return plain * (1 - ramp) + plain / rope.factor * ramp
