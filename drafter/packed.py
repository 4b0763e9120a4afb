"""bf16 linear layers on the CPU whose weights are laid out for oneDNN once, not at every call.

A drafting step multiplies few rows by many weights, so the time is the weights' way through memory: packed, the lm_head
took 3.5 ms instead of 5.3 (15 rows × 49,152 × 576, two threads, AVX-512 without AMX). These are the operators that
torch's own compiler emits for such layers; where this torch or CPU lacks them, the plain layer stays. Inference only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS = 16  # the row count that the layout is chosen for; any other works as well


class PackedLinear(nn.Module):
    """x `[..., in]` bf16 → `[..., out]`; holds no plain weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self._bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


def packable(weight: Tensor) -> bool:
    """Whether this weight can be packed by this torch on this CPU."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def linear(weight: Tensor) -> nn.Module:
    """A layer without bias that multiplies by `weight [out, in]`, packed where that is possible."""
    if packable(weight):
        return PackedLinear(weight)
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def pack_linears(model: nn.Module) -> None:
    """Replaces the linear layers inside `model` that can be packed."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear) and packable(layer.weight):
                setattr(parent, name, PackedLinear(layer.weight, layer.bias))
