"""Attention of one block over its sequence's cached keys. Knows shapes, no layers and no cache."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree.drafter.config import Span
from ddtree.drafter.dflash import visible


def keys_seen(span: Span, slots: int) -> int | None:
    """How many of the last keys (the block's own included) any query of a block of `slots` can see; None: all."""
    return None if span.window is None else span.window - 1 + slots


def block_attention(q: Tensor, k: Tensor, v: Tensor, span: Span) -> Tensor:
    """Attends from the last positions of a sequence.

    Args:
        q: `[slots, heads, head_dim]`.
        k, v: `[kv_heads, n, head_dim]` at consecutive positions, the last `slots` of them the block's own.
    Returns:
        `[slots, heads, head_dim]`.
    """
    slots, heads, head_dim = q.shape
    kv_heads, keys = k.shape[:2]
    group = heads // kv_heads
    # the query heads of one KV head become rows of it: K and V are read once and never repeated
    rows = q.view(slots, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, group * slots, head_dim)
    mask = None
    if not span.everything:
        at = torch.arange(keys, device=q.device)
        mask = visible(span, at[-slots:], at).repeat(group, 1)
    out = F.scaled_dot_product_attention(rows, k[None], v[None], attn_mask=mask)
    return out.view(kv_heads, group, slots, head_dim).permute(2, 0, 1, 3).reshape(slots, heads, head_dim)
