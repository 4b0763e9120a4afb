"""Answers packed into rows of equal width on the device, and the blocks drafted in a batch of rows. Knows no models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddtree.drafter.training.answers import Answers
from ddtree.drafter.training.ranks import ALONE, Ranks

OPEN_ROWS = 64  # rows that may still take a document while packing


@dataclass(frozen=True)
class Rows:
    """`[R, T]` each. Padding is a document of its own per token."""

    token: Tensor  # int32
    start: Tensor  # int32, row offset at which the token's document begins
    end: Tensor  # int32, one past its document's last token
    anchor: Tensor  # bool: an answer token with at least one token after it
    greedy: Tensor  # bool: of a greedy answer

    def __len__(self) -> int:
        return len(self.token)

    def take(self, index: Tensor) -> Rows:
        """The rows of `index` `[B]` int64."""
        return Rows(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Blocks:
    """Blocks drafted in a batch of rows: A per row, `block` slots each; slot 0 is the bonus token, the anchor."""

    anchor: Tensor  # [B, A] int64 row offset
    start: Tensor  # [B, A] int64, of the anchor's document
    used: Tensor  # [B, A] bool; an unused block counts nowhere
    at: Tensor  # [B, A, block] int64 row offset, clamped to the row
    wanted: Tensor  # [B, A, block] bool: the slot lies within the document
    token: Tensor  # [B, A, block] int64: what the text has there
    position: Tensor  # [B, A, block] int64, from the document's begin
    greedy: Tensor  # [B, A] bool


def split(answers: Answers, every: int) -> tuple[list[int], list[int]]:
    """Indices of `(training, validation)` answers: every `every`-th group is validation."""
    sides: tuple[list[int], list[int]] = ([], [])
    for i, group in enumerate(answers.group):
        sides[group % every == 0].append(i)
    return sides


def pack_rows(answers: Answers, chosen: Sequence[int], width: int, seed: int, device: torch.device) -> Rows:
    """Packs documents best-fit in random order; longer ones are cut to `width`."""
    lengths = [min(len(answers.tokens[i]), width) for i in chosen]
    layout = _layout(lengths, width, np.random.default_rng(seed))
    token = np.zeros((len(layout), width), np.int32)
    start = np.tile(np.arange(width, dtype=np.int32), (len(layout), 1))
    end = start + 1
    anchor, greedy = np.zeros_like(token, bool), np.zeros_like(token, bool)
    for r, row in enumerate(layout):
        at = 0
        for j in row:
            i, n = chosen[j], lengths[j]
            token[r, at : at + n] = answers.tokens[i][:n]
            start[r, at : at + n], end[r, at : at + n] = at, at + n
            anchor[r, at + answers.prompt_length[i] : at + n - 1] = True
            greedy[r, at : at + n] = answers.temperature[i] == 0
            at += n
    return Rows(*(torch.from_numpy(a).to(device) for a in (token, start, end, anchor, greedy)))


def _layout(lengths: list[int], width: int, rng: np.random.Generator) -> list[list[int]]:
    full: list[list[int]] = []
    rows: list[list[int]] = []
    room: list[int] = []
    for i in rng.permutation(len(lengths)):
        fitting = [r for r in range(len(rows)) if room[r] >= lengths[i]]
        best = min(fitting, key=room.__getitem__, default=None)
        if best is None:
            if len(rows) >= OPEN_ROWS:
                closed = min(range(len(rows)), key=room.__getitem__)
                full.append(rows.pop(closed))
                room.pop(closed)
            rows.append([])
            room.append(width)
            best = len(rows) - 1
        rows[best].append(int(i))
        room[best] -= lengths[i]
    return full + rows


def batch_index(rows: int, batch: int, step: int, seed: int) -> Tensor:
    """Rows of the `step`-th batch, `[batch]` int64 on the CPU; every pass has its own order. Needs rows ≥ batch."""
    per_pass = rows // batch
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step // per_pass)
    at = step % per_pass * batch
    return torch.randperm(rows, generator=generator)[at : at + batch]


def sample_blocks(
    rows: Rows, anchors: int, block: int, generator: torch.Generator | None = None, ranks: Ranks = ALONE
) -> Blocks:
    """Up to `anchors` random anchors in each row, ascending. `ranks`: share a batch, for all of which each of them draws."""
    device, width = rows.token.device, rows.token.shape[1]
    score = torch.rand(len(rows) * ranks.count, width, device=device, generator=generator)[ranks.part]
    score = score.masked_fill(~rows.anchor, -1.0)
    top, index = score.topk(anchors, dim=1)
    anchor, order = torch.where(top >= 0, index, 0).sort(1)
    used = torch.gather(top >= 0, 1, order)
    start, end = torch.gather(rows.start.long(), 1, anchor), torch.gather(rows.end.long(), 1, anchor)
    slot = torch.arange(block, device=device)
    at = anchor[:, :, None] + slot
    wanted = used[:, :, None] & (at < end[:, :, None])
    at = at.clamp(max=width - 1)
    return Blocks(
        anchor=anchor,
        start=start,
        used=used,
        at=at,
        wanted=wanted,
        token=torch.gather(rows.token.long(), 1, at.flatten(1)).view_as(at),
        position=(anchor - start)[:, :, None] + slot,
        greedy=torch.gather(rows.greedy, 1, anchor),
    )
