"""Drafts over contexts that grow one by one, with attention sequence by sequence: any device, any span of the layers.

This is how a CPU drafts, where a sequence's keys in one piece are worth more than few operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ddtree.drafter.block_attention import block_attention, keys_seen
from ddtree.drafter.context import SequenceContext
from ddtree.drafter.items import Candidates, DraftItem
from ddtree.drafter.stack import Stack
from ddtree.kernels.packed_linear import padded_rows


@dataclass(frozen=True)
class _Work:
    """A checked item and the context it extends; a new context joins the drafter's state when the call succeeds."""

    item: DraftItem
    context: SequenceContext
    rows: slice  # of its new context among the fused rows of the call

    @property
    def new_rows(self) -> int:
        return self.rows.stop - self.rows.start


class GrowingContexts:
    """The contexts of all sequences, a tensor each."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._contexts: dict[str, SequenceContext] = {}

    def __len__(self) -> int:
        """Sequences held."""
        return len(self._contexts)

    def end(self, sequence: str) -> int | None:
        """The position after its last context row; None where nothing is held of it."""
        held = self._contexts.get(sequence)
        return None if held is None else held.end

    def release(self, sequences: Iterable[str] | None) -> None:
        """None: all. One that is not held is no error."""
        for sequence in list(self._contexts) if sequences is None else sequences:
            self._contexts.pop(sequence, None)

    @torch.inference_mode()
    def draft(self, items: Sequence[DraftItem], features: Sequence[Tensor]) -> Candidates:
        """As `Drafter.draft`, of checked items. The candidates are new tensors."""
        works, stack = self._works(items), self._stack
        drafting = [work for work in works if work.item.bonus is not None]
        with stack.clock:
            self._feed(works, features)
            candidates = self._draft(drafting) if drafting else stack.no_candidates()
        for work in works:
            work.context.commit(work.new_rows)
            self._contexts[work.item.sequence] = work.context
        return candidates

    def _works(self, items: Sequence[DraftItem]) -> list[_Work]:
        config, works, first = self._stack.config, [], 0
        for item in items:
            if item.restart:
                start = item.context[0].position if item.context else 0
                context = SequenceContext(config, dtype=self._stack.dtype, device=self._stack.device, start=start)
            else:
                context = self._contexts[item.sequence]
            context.reserve(item.new_rows + config.block_size)
            works.append(_Work(item, context, slice(first, first + item.new_rows)))
            first += item.new_rows
        return works

    def _feed(self, works: list[_Work], features: Sequence[Tensor]) -> None:
        """Writes keys and values of all new context rows into their sequences' scratch rows."""
        stack, slices = self._stack, [part for work in works for part in work.item.context if part.rows]
        if slices:
            rows = torch.cat([features[part.source][part.rows].to(stack.device, stack.dtype) for part in slices])
            at = [p for part in slices for p in range(part.position, part.position + len(part.rows))]
            padding = padded_rows(len(at)) - len(at)  # behind the rows of all works
            rows, at = pad(rows, (0, 0, 0, padding)), at + [0] * padding
            stack.feed(rows, *stack.rotary(torch.tensor(at, device=stack.device)), _Cache(works, stack))

    def _draft(self, works: list[_Work]) -> Candidates:
        """One block per sequence, over its context and the rows just fed."""
        stack, config = self._stack, self._stack.config
        ids = [token for work in works for token in [work.item.bonus, *[config.mask_token_id] * config.horizon]]
        at = [work.item.position + slot for work in works for slot in range(config.block_size)]
        block, positions = torch.tensor([ids, at], device=stack.device)
        levels = max(config.horizon if work.item.levels is None else work.item.levels for work in works)
        return stack.draft(block, *stack.rotary(positions), _Cache(works, stack), levels)


@dataclass(frozen=True)
class _Cache:
    """The scratch rows of some sequences' contexts: a `Cache`."""

    works: list[_Work]
    stack: Stack

    def feed(self, kv: Tensor) -> None:
        for layer in range(kv.shape[1]):
            for work in self.works:
                work.context.write(layer, 0, *kv[work.rows, layer].chunk(2, 1))

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        slots, span = self.stack.config.block_size, self.stack.config.spans[layer]
        q, kv = q.unflatten(0, (-1, slots)), kv.unflatten(0, (-1, slots))
        attended = []
        for b, work in enumerate(self.works):
            work.context.write(layer, work.new_rows, *kv[b].chunk(2, 1))
            keys, values = work.context.view(layer, work.new_rows + slots, keys_seen(span, slots))
            attended.append(block_attention(q[b], keys, values, span))
        return torch.cat(attended)
