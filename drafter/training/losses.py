"""The loss of drafted slots, alone and after the token before them, some at a time, their logits being large. Knows no models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree.drafter.training.ops import cross_entropy_, row_logsumexp
from ddtree.drafter.training.ranks import ALONE, Ranks
from ddtree.drafter.training.rows import Blocks

LOGIT_CELLS = 16384 * 49152  # logits held at once


@dataclass(frozen=True)
class Term:
    """One of the two losses."""

    loss: Tensor  # [] mean over slots by their weight
    hits: Tensor  # [B, A, block-1] fp32: 1 where the slot's most likely token is the text's


@dataclass(frozen=True)
class Graded:
    """Losses of a batch of blocks, and gradients of their weighted mean."""

    own: Term | None  # of the slots alone; None where its share is 0
    path: Term | None  # after the text's token before each slot; None without a path head
    of_drafted: Tensor | None  # [B, A, block-1, d]; None where it is not asked for
    of_before: Tensor | None  # [B, A, block-1, r]
    of_itself: Tensor | None  # [V, r]


@torch.no_grad()
def grade(
    blocks: Blocks,
    drafted: Tensor,
    teacher: Tensor,
    lm_head: Tensor,
    slot_decay: float,
    path: tuple[Tensor, Tensor] | None = None,
    path_share: float = 1.0,
    ranks: Ranks = ALONE,
) -> Graded:
    """Cross-entropy of the slots after the bonus token: hard labels in greedy answers, the target's distribution in sampled ones.

    Args:
        drafted: `[B, A, block-1, d]` hidden states of the slots; its gradient is made where it requires one.
        teacher: `[B, T, d]` the target's last hidden state, normed.
        lm_head: `[V, d]`.
        slot_decay: slot k weighs exp(-(k-1) / slot_decay).
        path: `[B, A, block-1, r]` and `[V, r]`, whose product a path head adds to the logits.
        path_share: of the mean, of the loss with it; above 0. The rest is of the loss without.
        ranks: the processes that share a batch; losses are of the whole, gradients are to be summed.
    """
    slots, flat = blocks.wanted[:, :, 1:], drafted.detach().flatten(0, 2)
    k = torch.arange(slots.shape[-1], device=flat.device)
    weight = torch.exp(-k / slot_decay) * slots
    total = ranks.sum_(weight.sum())
    soft = torch.where(blocks.greedy, 0.0, 1.0)[:, :, None].expand_as(weight).reshape(-1).contiguous()
    row = torch.arange(len(weight), device=flat.device)[:, None, None] * teacher.shape[1]
    teacher_row = (row + blocks.at[:, :, :-1]).reshape(-1).int()
    label, weight = blocks.token[:, :, 1:].reshape(-1), weight.reshape(-1)
    taught = F.linear(teacher.flatten(0, 1), lm_head)
    taught_lse = row_logsumexp(taught)

    def learn(logits: Tensor, c: slice, share: float) -> tuple[Tensor, Tensor]:
        """`(loss, hit)` of some slots, whose logits become their gradient, both times `share`."""
        return cross_entropy_(logits, taught, taught_lse, teacher_row[c], label[c], weight[c] * share, soft[c])

    own, after = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
    of_drafted = torch.empty_like(flat) if drafted.requires_grad else None
    before, itself = (factor.detach().to(flat.dtype) for factor in path or (flat[:0], lm_head[:0]))
    before = before.flatten(0, -2)
    of_before, of_itself = torch.empty_like(before), torch.zeros_like(itself, dtype=torch.float32)
    own_share = 1 - path_share if path else 1.0
    chunk = max(1, LOGIT_CELLS // len(lm_head))
    for a in range(0, len(label), chunk):
        c = slice(a, a + chunk)
        logits = F.linear(flat[c], lm_head)
        if path:
            conditioned = logits.addmm(before[c], itself.T)
            after.append(learn(conditioned, c, path_share))
            of_before[c] = conditioned @ itself
            of_itself.add_(conditioned.T @ before[c])
        if own_share:
            own.append(learn(logits, c, own_share))
        if of_drafted is not None:
            parts = ([logits] if own_share else []) + ([conditioned] if path else [])
            of_drafted[c] = torch.add(*parts) @ lm_head if len(parts) > 1 else parts[0] @ lm_head

    def term(found: list[tuple[Tensor, Tensor]], share: float) -> Term | None:
        if not found:
            return None
        losses, hits = (torch.cat(part) for part in zip(*found, strict=True))
        return Term(ranks.sum_(losses.sum()) / (total * share), hits.view_as(slots) * slots)

    return Graded(
        own=term(own, own_share),
        path=term(after, path_share),
        of_drafted=None if of_drafted is None else (of_drafted / total).view_as(drafted),
        of_before=(of_before.float() / total).unflatten(0, slots.shape) if path else None,
        of_itself=of_itself / total if path else None,
    )
