"""Linear layers of a transformers decoder that read the same input, joined: fewer and larger multiplications.

The joined layer goes to where the input is made, and what reads it takes its columns of the product. So a model's own
code runs as it is. Knows transformers' names for the parts of a layer, and no device.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn


def join_linears(layers: Iterable[Any]) -> None:
    """Join q, k and v of every decoder layer, and gate and up where its feed-forward has them, in place.

    For layers whose attention reads `input_layernorm`'s output through these three alone. No weight is held twice.
    """
    for layer in layers:
        layer.input_layernorm = nn.Sequential(
            layer.input_layernorm, _joined(layer.self_attn, ("q_proj", "k_proj", "v_proj"))
        )
        if isinstance(getattr(layer.mlp, "gate_proj", None), nn.Linear):  # else it routes to experts
            layer.mlp = nn.Sequential(_joined(layer.mlp, ("gate_proj", "up_proj")), layer.mlp)


class Columns(nn.Module):
    """In place of a layer that was joined: x [..., all outputs] → [..., its own]."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self._first, self._last = first, last

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self._first : self._last]


@torch.no_grad()
def _joined(owner: Any, names: tuple[str, ...]) -> nn.Linear:
    """One layer with the outputs of the owner's linear layers side by side; theirs are taken away."""
    linears: list[nn.Linear] = [getattr(owner, name) for name in names]
    ends = [0, *accumulate(linear.out_features for linear in linears)]
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    joined = nn.Linear(linears[0].in_features, ends[-1], bias=bool(biases), device="meta")
    joined.weight = nn.Parameter(torch.cat(tuple(linear.weight for linear in linears)), requires_grad=False)
    if biases:
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    for name, part in zip(names, pairwise(ends), strict=True):
        setattr(owner, name, Columns(*part))
    return joined
