"""Keys and values of one sequence's context rows, for every drafter layer. Knows no model and no other sequence.

Rows past `length` are scratch: a draft writes new context rows and its block's rows there, and only `commit` makes the
context rows part of the state. So a draft that fails changes nothing, and block rows are dropped by being overwritten.
Sliding layers keep all rows too; what they see is decided at attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.drafter.config import DrafterConfig

INITIAL_ROWS = 256


class SequenceContext:
    """Context rows of contiguous positions `start … end - 1`; empty at first."""

    def __init__(self, config: DrafterConfig, *, dtype: torch.dtype, device: torch.device, start: int = 0) -> None:
        self.start = start
        self.length = 0
        shape = (config.num_layers, 2, config.num_kv_heads, INITIAL_ROWS, config.head_dim)
        self._rows = torch.empty(shape, dtype=dtype, device=device)

    @property
    def end(self) -> int:
        """The position after the last context row."""
        return self.start + self.length

    @property
    def capacity(self) -> int:
        return self._rows.shape[3]

    def reserve(self, scratch: int) -> None:
        """Makes room for `scratch` rows past the context, by doubling; the context stays as it is."""
        capacity = self.capacity
        while capacity < self.length + scratch:
            capacity *= 2
        if capacity > self.capacity:
            layers, two, heads, _, head_dim = self._rows.shape
            grown = self._rows.new_empty(layers, two, heads, capacity, head_dim)
            grown[:, :, :, : self.length] = self._rows[:, :, :, : self.length]
            self._rows = grown

    def write(self, layer: int, offset: int, k: Tensor, v: Tensor) -> None:
        """Scratch rows `offset …` past the context of one layer: k and v `[n, kv_heads, head_dim]`."""
        begin = self.length + offset
        self._rows[layer, 0, :, begin : begin + k.shape[0]] = k.transpose(0, 1)
        self._rows[layer, 1, :, begin : begin + v.shape[0]] = v.transpose(0, 1)

    def view(self, layer: int, scratch: int, last: int | None = None) -> tuple[Tensor, Tensor]:
        """k and v `[kv_heads, n, head_dim]` of the context and `scratch` rows past it; only the `last` n if given."""
        stop = self.length + scratch
        begin = 0 if last is None else max(0, stop - last)
        rows = self._rows[layer, :, :, begin:stop]
        return rows[0], rows[1]

    def commit(self, rows: int) -> None:
        """Makes the first `rows` scratch rows context."""
        self.length += rows
