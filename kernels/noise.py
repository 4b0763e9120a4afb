"""Counter-based randomness: one Gumbel number per (seed, position, token id), the same in any batch and on any machine.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011): counter (token id //
4, position low, position high, 0), key = the two halves of the seed; word `token id % 4` of a block is the token's.
Knows no logits.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import cache
from typing import Any

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """The Philox4x32-10 block function on int64 tensors that hold 32-bit words; shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # wraps at 64 bits, which keeps both halves
        c0, c1, c2, c3 = (p1 >> 32) & _LOW ^ c1 ^ k0, p1 & _LOW, (p0 >> 32) & _LOW ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def gumbel(seed: Tensor, position: Tensor, ids: Tensor) -> Tensor:
    """float32 Gumbel(0, 1) noise of int64 `seed`, `position` and token `ids`, which broadcast."""
    words = torch.stack(torch.broadcast_tensors(*_blocks(seed, position, ids >> 2)), dim=-1)
    return _to_gumbel(words.gather(-1, (ids & 3).expand(words.shape[:-1]).unsqueeze(-1)).squeeze(-1))


def _blocks(seed: Tensor, position: Tensor, block: Tensor) -> Words:
    counter = (block, position & _LOW, (position >> 32) & _LOW, torch.zeros_like(block))
    return philox(counter, (seed & _LOW, (seed >> 32) & _LOW))


def _to_gumbel(words: Tensor) -> Tensor:
    """-log(-log u), u = (top 24 bits + 1/2) / 2^24. In float64: u next to 1 has no float32."""
    u = ((words >> 8).double() + 0.5) * 2.0**-24
    return u.log_().neg_().log_().neg_().float()


class KeyedNoise:
    """Noise over a whole vocabulary. Keeps the rows used last: nodes at a depth share one, and rounds return to it."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu", *, max_bytes: int = 64 << 20) -> None:
        self._ids = torch.arange(vocab_size, device=device)
        self._capacity = max(1, max_bytes // (4 * vocab_size))
        self._rows: OrderedDict[tuple[int, int], Tensor] = OrderedDict()  # least recently used first

    def row(self, seed: int, position: int) -> Tensor:
        """[V] float32, equal to `gumbel(seed, position, 0 … V-1)`. Shared: do not write to it."""
        row = self._rows.pop((seed, position), None)
        if row is None:
            row = self._draw(seed, position)
            if len(self._rows) >= self._capacity:
                self._rows.popitem(last=False)
        self._rows[seed, position] = row
        return row

    def rows(self, seed: Tensor, position: Tensor) -> Tensor:
        """[R, V] float32 of int64 `seed` and `position` [R], on their device: what `row` gives, for a GPU, which computes faster
        than the host keeps and finds."""
        blocks = self._ids[: -(-len(self._ids) // 4)]
        if not seed.is_cuda:
            return _whole(seed, position, blocks)[:, : len(self._ids)]
        n = len(seed)
        if n == 1:  # what is compiled for one row would be compiled beside what serves all other numbers
            seed, position = seed.expand(2), position.expand(2)
        return _compiled()(seed, position, blocks)[:n, : len(self._ids)]

    def _draw(self, seed: int, position: int) -> Tensor:
        """Each Philox block gives four tokens their noise, so a whole row costs a quarter of `gumbel`."""
        return self.rows(self._ids.new_tensor([seed]), self._ids.new_tensor([position]))[0]


def _whole(seed: Tensor, position: Tensor, blocks: Tensor) -> Tensor:
    """[R, 4 · blocks] float32."""
    words = _blocks(seed[:, None], position[:, None], blocks)
    return _to_gumbel(torch.stack(torch.broadcast_tensors(*words), dim=-1)).flatten(1)


@cache
def _compiled() -> Any:
    """`_whole` in one kernel instead of 150."""
    return torch.compile(_whole, dynamic=True)
