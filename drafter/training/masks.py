"""Who sees whom in packed rows: documents of the target, many drafted blocks of the drafter. Knows no models.

Each mask keeps its buffers for life and is refilled in place, so that compiled attention meets the same tensors at every step.
`dense()` defines the mask; `tiles()` covers it conservatively for flex attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ddtree.drafter.training.options import TILE


class DocumentMask:
    """Causal within packed documents. `start` `[B, T]` int32: the row offset at which each token's document begins."""

    def __init__(self, batch: int, context: int, device: torch.device) -> None:
        self.context = context
        self.start = torch.zeros(batch, context, dtype=torch.int32, device=device)
        start = self.start
        self.sees: Callable[..., Any] = lambda b, h, q, kv: (kv <= q) & (kv >= start[b, q])

    def dense(self) -> Tensor:
        """Bool `[B, 1, T, T]`, True where seen."""
        i = torch.arange(self.context, device=self.start.device)
        return torch.stack([self.sees(b, 0, i[:, None], i[None]) for b in range(len(self.start))])[:, None]

    def tiles(self) -> Tensor:
        """Bool `[B, T/TILE, T/TILE]`."""
        n = self.context // TILE
        low = torch.arange(n, device=self.start.device) * TILE
        first = self.start.view(-1, n, TILE).amin(-1)[:, :, None]
        return (low[None, None] <= low[None, :, None]) & (first < low + TILE)

    def block_mask(self) -> BlockMask:
        """For flex attention over `[B, H, T, D]`."""
        return _block_mask(self.tiles(), self.sees, (self.context, self.context))


class AnchorMask:
    """Many blocks in one row: block a sees context rows start[a] .. anchor[a]-1 and itself, nothing else.

    `anchor`, `start` `[B, A]` int32. An unused block has both 0 and sees only itself. Keys are [context ; blocks].
    """

    def __init__(self, batch: int, context: int, anchors: int, block: int, device: torch.device) -> None:
        self.context, self.anchors, self.block = context, anchors, block
        self.anchor = torch.zeros(batch, anchors, dtype=torch.int32, device=device)
        self.start = torch.zeros_like(self.anchor)
        anchor, start = self.anchor, self.start

        def sees(b: Any, h: Any, q: Any, kv: Any) -> Any:
            a = q // block
            before = (kv < context) & (kv >= start[b, a]) & (kv < anchor[b, a])
            return before | ((kv >= context) & ((kv - context) // block == a))

        self.sees: Callable[..., Any] = sees

    def dense(self) -> Tensor:
        """Bool `[B, 1, A·block, T + A·block]`, True where seen."""
        q = torch.arange(self.anchors * self.block, device=self.anchor.device)[:, None]
        kv = torch.arange(self.context + self.anchors * self.block, device=self.anchor.device)[None]
        return torch.stack([self.sees(b, 0, q, kv) for b in range(len(self.anchor))])[:, None]

    def tiles(self) -> Tensor:
        """Bool `[B, A·block/TILE, (T + A·block)/TILE]`."""
        rows, per = self.anchors * self.block // TILE, TILE // self.block
        anchor, start = self.anchor.view(-1, rows, per, 1), self.start.view(-1, rows, per, 1)
        low = torch.arange(self.context // TILE, device=anchor.device) * TILE
        context = ((anchor > low) & (start < low + TILE)).any(2)
        own = torch.eye(rows, dtype=torch.bool, device=anchor.device).expand(len(anchor), -1, -1)
        return torch.cat([context, own], -1)

    def block_mask(self) -> BlockMask:
        """For flex attention of `[B, H, A·block, D]` over `[B, H, T + A·block, D]`."""
        queries = self.anchors * self.block
        return _block_mask(self.tiles(), self.sees, (queries, self.context + queries))


def _block_mask(tiles: Tensor, sees: Callable[..., Any], lengths: tuple[int, int]) -> BlockMask:
    occupied = tiles[:, None]
    count = occupied.sum(-1, dtype=torch.int32)
    order = torch.argsort(occupied.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)
    return BlockMask.from_kv_blocks(count, order, BLOCK_SIZE=TILE, mask_mod=sees, seq_lengths=lengths)
