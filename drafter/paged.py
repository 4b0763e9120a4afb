"""Drafts over contexts in one paged pool: whole batches at once, as CUDA graphs where the device has them.

For layers without a window: which rows a window hides, the attention kernels cannot be told. Knows which pages and
positions belong to which sequence; what runs over them is a `Pass`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice

import torch
from torch import Tensor

from ddtree.drafter.items import Candidates, DraftItem
from ddtree.drafter.pages import FreePages
from ddtree.drafter.passes import PAGE, ContextPool, Extension, Pass, Place
from ddtree.drafter.stack import Stack
from ddtree.kernels.waiting import WaitsForDevice

log = logging.getLogger(__name__)


class PagedContexts:
    """The contexts of all sequences in one pool of pages, and the passes over them."""

    def __init__(self, stack: Stack, *, context_tokens: int, max_sequences: int, graphs: bool) -> None:
        """Allocates the pool and captures the graphs.

        Args:
            context_tokens: context rows of all sequences together, rounded down to pages of 64.
            max_sequences: the most that one call drafts for.
            graphs: run small passes as CUDA graphs where that is possible.
        Raises:
            ValueError: layers with a window, or sizes without room for one block.
        """
        config = stack.config
        if any(span.window is not None for span in config.spans):
            raise ValueError("paged contexts serve no layers with a sliding window")
        pages, least = context_tokens // PAGE, -(-config.block_size // PAGE)
        if max_sequences < 1 or pages < least:
            raise ValueError(
                f"{max_sequences} sequences in {context_tokens} context tokens: give at least one sequence and "
                f"{least * PAGE} tokens"
            )
        self._stack, self._free = stack, FreePages(pages, PAGE)
        self._pool = ContextPool(stack, pages)
        self._width = max(least, min(pages, -(-config.max_positions // PAGE)))
        self._held: dict[str, tuple[Place, int]] = {}  # and context rows
        sizes = [2**i for i in range((max_sequences - 1).bit_length())]
        self._passes = [self._pass(size * config.block_size, size) for size in [*sizes, max_sequences]]
        if stack.device.type == "cuda" and graphs:
            self._capture()

    def _pass(self, rows: int, blocks: int) -> Pass:
        return Pass(self._stack, self._pool, rows=rows, blocks=blocks, width=self._width)

    def _capture(self) -> None:
        began, memory = time.perf_counter(), torch.cuda.graph_pool_handle()
        try:
            for each in reversed(self._passes):  # the largest first: the others fit into its memory
                each.capture(memory)
        except WaitsForDevice as error:
            log.warning("drafts run without CUDA graphs: no kernel serves this head size or dtype (%s)", error)
        else:
            seconds = time.perf_counter() - began
            sizes = ", ".join(str(each.blocks) for each in self._passes)
            log.info("captured CUDA graphs for drafts of %s sequences in %.1f s", sizes, seconds)

    def __len__(self) -> int:
        """Sequences held."""
        return len(self._held)

    def end(self, sequence: str) -> int | None:
        """The position after its last context row; None where nothing is held of it."""
        held = self._held.get(sequence)
        return None if held is None else held[0].start + held[1]

    def release(self, sequences: Iterable[str] | None) -> None:
        """None: all. One that is not held is no error."""
        for sequence in list(self._held) if sequences is None else sequences:
            if (held := self._held.pop(sequence, None)) is not None:
                self._free.give(held[0].pages.tolist())

    def draft(self, items: Sequence[DraftItem], features: Sequence[Tensor]) -> Candidates:
        """As `Drafter.draft`, of checked items. The candidates may be overwritten by the next call.

        Raises:
            ContextFull: too few pages are free.
            ValueError: more blocks than `max_sequences`.
        """
        blocks, most = sum(item.bonus is not None for item in items), self._passes[-1].blocks
        if blocks > most:
            raise ValueError(f"a call drafts for at most {most} sequences (max_sequences)")
        extensions, taken = self._reserve(items)
        try:
            candidates = self._run(extensions, blocks, _sources(items, features), features)
        except BaseException:
            self._free.give(taken)
            raise
        for item, extension in zip(items, extensions, strict=True):
            if item.restart:
                self.release([item.sequence])
            self._held[item.sequence] = extension.place, extension.length
        return candidates

    def _reserve(self, items: Sequence[DraftItem]) -> tuple[list[Extension], list[int]]:
        """What every item adds, and the pages taken for it: for the new rows and the block."""
        block, extensions, wanted = self._stack.config.block_size, [], {}
        for i, (sequence, restart, context, bonus, _, _) in enumerate(items):
            if restart:
                place, old = Place.empty(context[0].position if context else 0), 0
            else:
                place, old = self._held[sequence]
            length = old
            for part in context:
                length += len(part.rows)
            missing = length + (0 if bonus is None else block) - place.rows.shape[1]
            if missing > 0:
                wanted[i] = -(-missing // PAGE)
            extensions.append(Extension(place, old, length, bonus))
        taken = self._free.take(sum(wanted.values()))
        free = iter(taken)
        for i, pages in wanted.items():
            place = extensions[i].place.extended(list(islice(free, pages)))
            extensions[i] = extensions[i]._replace(place=place)
        return extensions, taken

    def _run(
        self, extensions: list[Extension], blocks: int, sources: list[int], features: Sequence[Tensor]
    ) -> Candidates:
        n = len(sources)
        source = _one(features, self._stack) if n else None
        chosen = next(each for each in self._passes if each.blocks >= blocks)
        if n > (chosen.rows if blocks else 0):  # prompt chunks go ahead of the blocks
            alone = self._pass(n, 0)
            alone.load([extension._replace(bonus=None) for extension in extensions], sources, source)
            alone.run(0)
            extensions, sources = [extension.fed() for extension in extensions], []
        if not blocks:
            return self._stack.no_candidates()
        chosen.load(extensions, sources, source)
        return chosen.run(blocks)


def _sources(items: Sequence[DraftItem], features: Sequence[Tensor]) -> list[int]:
    """Of all new context rows, which row of `_one` each is made from."""
    parts = [part for item in items for part in item.context]
    if len(features) == 1:
        return [row for part in parts for row in part.rows]
    first = [0, *accumulate(tensor.shape[0] for tensor in features)]
    return [first[part.source] + row for part in parts for row in part.rows]


def _one(features: Sequence[Tensor], stack: Stack) -> Tensor:
    """All features in one tensor as the model wants them; a single one that is so already is not copied."""
    if len(features) == 1 and features[0].dtype == stack.dtype and features[0].device == stack.device:
        return features[0]
    return torch.cat([tensor.to(stack.device, stack.dtype) for tensor in features])
