"""What goes into a draft call, what comes out, and the checks on the way in. Knows no model, changes no state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ddtree.drafter.config import DrafterConfig


class FeatureSlice(NamedTuple):  # a tuple, as the next: made, sent and read for every sequence of every round
    """Where the target features of some consecutive positions are. Written by the router."""

    source: int  # index into the features given to the same call
    rows: list[int]  # rows of that tensor, one per position
    position: int  # absolute position of the token that rows[0] was computed from


class DraftItem(NamedTuple):
    """One sequence in a call. Written by the router."""

    sequence: str
    restart: bool  # forget what is held of this sequence (or nothing is held yet)
    context: list[FeatureSlice]  # new context, contiguous, continuing what is held
    bonus: int | None  # the token to draft after; None only feeds context
    position: int  # absolute position of the bonus token; the context ends just before it
    levels: int | None = None  # of the next positions so many are wanted; None: all. There may be more in the answer

    @property
    def new_rows(self) -> int:
        return sum(len(part.rows) for part in self.context)


def packed(items: Sequence[DraftItem]) -> list[tuple[Any, ...]]:
    """The items as plain tuples, which pickle makes and opens in half the time. See `unpacked`."""
    return [
        (sequence, restart, [tuple(part) for part in context], bonus, position, levels)
        for sequence, restart, context, bonus, position, levels in items
    ]


def unpacked(tuples: Sequence[tuple[Any, ...]]) -> list[DraftItem]:
    new = tuple.__new__  # theirs is a function of Python
    return [
        new(DraftItem, (sequence, restart, [new(FeatureSlice, part) for part in context], bonus, position, levels))
        for sequence, restart, context, bonus, position, levels in tuples
    ]


@dataclass(frozen=True)
class Candidates:
    """The drafter's best tokens for each of the next L positions; one row per item with a bonus, in order."""

    logprobs: Tensor  # [B, L, K] fp32, best first; -inf where there is no candidate
    ids: Tensor  # [B, L, K] int32; -1 where there is no candidate
    # [B, L-1, K, K] fp32, where there is a path head: [b, d-1, i, j] is of candidate j of depth d+1 after candidate i of depth d.
    # Then logprobs[:, 0] are given the bonus token, in no order; those of deeper ones stay what they are whatever came before.
    conditional: Tensor | None = None

    def first(self, rows: int) -> Candidates:
        below = None if self.conditional is None else self.conditional[:rows]
        return Candidates(self.logprobs[:rows], self.ids[:rows], below)


def check_items(
    items: Sequence[DraftItem], features: Sequence[Tensor], end_of: Callable[[str], int | None], config: DrafterConfig
) -> None:
    """Raises ValueError, naming the sequence and the reason, where a call cannot be done.

    Args:
        end_of: sequence → position after its last held context row; None: nothing is held of it.
    """
    width = len(config.target_layer_ids) * config.hidden_size
    available = []
    for source, tensor in enumerate(features):
        shape = tensor.shape
        if len(shape) != 2 or shape[1] != width:
            raise ValueError(f"features[{source}] is {tuple(shape)}, expected [rows, {width}]")
        available.append(shape[0])
    seen: set[str] = set()
    for item in items:
        reason = "twice in one call" if item.sequence in seen else _fault(item, available, end_of, config)
        if reason:
            raise ValueError(f"sequence {item.sequence!r}: {reason}")
        seen.add(item.sequence)


def _fault(
    item: DraftItem, available: list[int], end_of: Callable[[str], int | None], config: DrafterConfig
) -> str | None:
    """`available`: rows of each features tensor."""
    end = None if item.restart else end_of(item.sequence)  # None: the first slice decides
    if end is None and not item.restart:
        return "no context is held for it; send all of it with restart"
    for part in item.context:
        rows, position = part.rows, part.position
        if not 0 <= part.source < len(available):
            return f"feature source {part.source} is not among the {len(available)} given"
        if rows and (min(rows) < 0 or max(rows) >= available[part.source]):
            return f"rows {rows} are not all among the {available[part.source]} of features[{part.source}]"
        if position < 0 or (end is not None and position != end):
            return f"context comes at position {position}, expected {end if end is not None else '0 or later'}"
        end = position + len(rows)
    end = end or 0
    if end > config.max_positions:
        return f"context up to position {end} is past the drafter's {config.max_positions} positions"
    if item.bonus is None:
        return None
    if not 0 <= item.bonus < config.vocab_size:
        return f"bonus token {item.bonus} is outside the vocabulary of {config.vocab_size}"
    if item.position != end:
        return f"the bonus token is at position {item.position}, but the context ends before position {end}"
    if not config.drafts_at(item.position):
        return f"a block at position {item.position} does not fit the drafter's {config.max_positions} positions"
    return None
