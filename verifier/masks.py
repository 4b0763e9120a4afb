"""Tokens that a grammar forbids are not drawn. Knows no grammar, no model and no draw."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ddtree.verifier.batch import TokenMasks
from ddtree.verifier.edits import BANNED

_BLOCK = 1 << 24  # logits that are masked at once: a few times so many are held beside them


def mask(logits: Tensor, masks: TokenMasks, *, bans: bool = True) -> Tensor:
    """The logits to draw from, [M, V] float32, written over where they are that already. Waits for no device.

    Where everything that a mask allows is banned, as stop tokens are before `min_tokens`, the ban gives way: nothing else could
    be drawn. `bans`: whether any logit may be BANNED.
    """
    logits = logits.float()
    vocab_size = logits.shape[1]
    caps = _caps(logits.device)
    for part in torch.arange(len(masks.row), device=logits.device).split(max(1, _BLOCK // vocab_size)):
        row, which = masks.row[part].long(), masks.mask[part].long()
        in_bytes = masks.allowed[which].view(torch.uint8)
        cap = caps.index_select(0, in_bytes.flatten().int()).view(len(row), -1)[:, :vocab_size]
        x = logits.index_select(0, row)
        x = torch.minimum(x, cap).add_(x * 0)  # NaN where a logit is not finite, so that it stays so
        if bans:
            nothing = x.amax(-1, keepdim=True) <= BANNED
            x.masked_fill_((cap > 0) & nothing, 0.0)
        logits.index_copy_(0, row, x)
    return logits


@cache
def _caps(device: torch.device) -> Tensor:
    """[256, 8] float32: for each byte the most that the logits of its bits may be, the lowest bit first. On a CPU a branch per
    token would take ten times as long."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.where(bits.bool(), torch.inf, BANNED).to(device)
