"""Integers that the host fills in and the device reads: one buffer, one copy. Knows no field's meaning."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes


class Staging:
    """Named arrays on the host, and tensors of the same contents at fixed addresses on the device."""

    def __init__(self, fields: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        sizes = [torch.Size(shape).numel() * dtype.itemsize for dtype, shape in fields.values()]
        begins = [0]
        for size in sizes:
            begins.append(begins[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        self._host = torch.zeros(begins[-1], dtype=torch.uint8, pin_memory=on_gpu)
        self._device = torch.zeros(begins[-1], dtype=torch.uint8, device=device)
        self._sent = torch.cuda.Event() if on_gpu else None
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, Tensor] = {}
        for (name, (dtype, shape)), begin, size in zip(fields.items(), begins, sizes, strict=False):
            self.host[name] = self._host[begin : begin + size].view(dtype).view(shape).numpy()
            self.device[name] = self._device[begin : begin + size].view(dtype).view(shape)

    def wait(self) -> None:
        """Until the host's arrays may be filled in again: the copy of what they held has been made."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self) -> None:
        """Enqueues the copy."""
        self._device.copy_(self._host, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
