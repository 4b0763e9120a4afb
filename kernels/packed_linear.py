"""Linear layers whose weight lies as oneDNN's kernels read it, so that no call reorders it first. Knows no model.

Measured on one core for the 210 matrices of SmolLM2-135M, packed against plain: bfloat16 1.4 to 2 times as fast at 1 to
33 rows, with the same bits; float32 1.4 to 1.9 times at 5 to 33 rows, equal up to the order of summation.

oneDNN compiles a kernel for each shape: a millisecond and up to 0.6 MB for every number of rows that a layer sees, and the last
1,024 are kept. A server's steps have any number of rows, so who calls many layers pads them to `padded_rows` first.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_ROWS_HINT = 16  # any hint from 8 to 64 gives the same layout and speed; 1 gives a slow one for float32


class PackedLinear(nn.Module):
    """`nn.Linear` for inference on a CPU: x [..., in] → [..., out]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)
        self._bias: Tensor | None = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x.new_empty((*x.shape[:-1], self.out_features))
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")


def padded_rows(rows: int) -> int:
    """As many up to 64, the next multiple of 8 up to 256, and of 32 beyond: few kernels, and little to compute for nothing. 2 for
    one: alone it is summed in another order, and would not get the bits that it gets among others."""
    each = 1 if rows <= 64 else 8 if rows <= 256 else 32
    return 2 if rows == 1 else -(-rows // each) * each


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch has the operators, which it uses in compiled code itself but does not promise to anyone."""
    return (
        device.type == "cpu"
        and dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and (dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack(linear: nn.Linear) -> nn.Module:
    """The layer packed, or as it is where it cannot be."""
    return PackedLinear(linear) if can_pack(linear.weight.device, linear.weight.dtype) else linear


def pack_linears(module: nn.Module) -> None:
    """Pack every linear layer inside `module`, in place."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, pack(child))
        else:
            pack_linears(child)
