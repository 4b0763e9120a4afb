"""Small memory of a round that the GPU reads in place: pinned on the host, so that nothing needs to be copied.

On a CPU it is ordinary memory. Knows shapes, not what the numbers mean.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RoundMemory:
    """What one round has, the next one overwrites: the stream must be done by then."""

    def __init__(self, device: torch.device, max_sequences: int) -> None:
        pinned = device.type == "cuda"
        self._numbers = torch.empty(3, max_sequences, dtype=torch.int32, pin_memory=pinned)
        self._seeds = torch.empty(max_sequences, dtype=torch.int64, pin_memory=pinned)
        self._scales = torch.empty(max_sequences, dtype=torch.float32, pin_memory=pinned)

    def numbers(self, *rows: list[int]) -> tuple[Tensor, ...]:
        """Up to three rows of equal length, as int32 tensors."""
        width = len(rows[0])
        self._numbers.numpy()[: len(rows), :width] = rows
        return self._numbers[: len(rows), :width].unbind()

    def draws(self, seeds: list[int], scales: list[float]) -> tuple[Tensor, Tensor]:
        """As int64 and float32 tensors."""
        self._seeds.numpy()[: len(seeds)] = seeds
        self._scales.numpy()[: len(seeds)] = scales
        return self._seeds[: len(seeds)], self._scales[: len(seeds)]
