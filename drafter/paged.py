"""Drafts over contexts in one paged pool: whole batches at once, as CUDA graphs where the device has them.

For layers without a window: which rows a window hides, the attention kernels cannot be told. Knows which pages and
positions belong to which sequence; what runs over them is a `Pass`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice

import numpy as np
import torch
from torch import Tensor

from ddtree.drafter.items import Candidates, DraftItem
from ddtree.drafter.pages import FreePages
from ddtree.drafter.passes import PAGE, ContextPool, Extension, Pass
from ddtree.drafter.stack import Stack
from ddtree.kernels.waiting import WaitsForDevice

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Held:
    """A sequence's context: `length` rows from position `start` on, in its pages, which have room for more."""

    start: int
    length: int = 0
    pages: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    slots: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # of the pages

    def extended(self, length: int, taken: list[int]) -> _Held:
        pages, slots = self.pages, self.slots
        if taken:
            pages = np.array([*pages, *taken])
            slots = (pages[:, None] * PAGE + np.arange(PAGE)).ravel()
        return _Held(self.start, length, pages, slots)


@dataclass(frozen=True)
class _Work:
    """A checked item, its context when the call succeeds, and the pages taken for it."""

    item: DraftItem
    held: _Held
    taken: list[int]

    def extension(self, first: Sequence[int]) -> Extension:
        """`first`: the row of each features tensor when all lie in one."""
        item, held = self.item, self.held
        rows = [first[part.source] + row for part in item.context for row in part.rows]
        old = held.length - len(rows)
        return Extension(rows, held.start + old, held.slots[old:], held.length, held.pages, item.bonus)


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
        self._held: dict[str, _Held] = {}
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

    def ends(self) -> dict[str, int]:
        """Sequence → position after its last context row."""
        return {name: held.start + held.length for name, held in self._held.items()}

    def release(self, sequences: Iterable[str]) -> None:
        for sequence in sequences:
            if (held := self._held.pop(sequence, None)) is not None:
                self._free.give(held.pages.tolist())

    def draft(self, items: Sequence[DraftItem], features: Sequence[Tensor]) -> Candidates:
        """As `Drafter.draft`, of checked items. The candidates may be overwritten by the next call.

        Raises:
            ContextFull: too few pages are free.
            ValueError: more blocks than `max_sequences`.
        """
        most = self._passes[-1].blocks
        if sum(item.bonus is not None for item in items) > most:
            raise ValueError(f"a call drafts for at most {most} sequences (max_sequences)")
        works = self._reserve(items)
        try:
            candidates = self._run(works, features)
        except BaseException:
            self._free.give(page for work in works for page in work.taken)
            raise
        for work in works:
            if work.item.restart:
                self.release([work.item.sequence])
            self._held[work.item.sequence] = work.held
        return candidates

    def _reserve(self, items: Sequence[DraftItem]) -> list[_Work]:
        """Pages for the new rows and the block of every item."""
        plans = []
        for item in items:
            start = item.context[0].position if item.context else 0
            before = _Held(start) if item.restart else self._held[item.sequence]
            length = before.length + item.new_rows
            room = length if item.bonus is None else length + self._stack.config.block_size
            plans.append((item, before, length, max(0, -(-room // PAGE) - len(before.pages))))
        free = iter(self._free.take(sum(need for *_, need in plans)))
        works = []
        for item, before, length, need in plans:
            taken = list(islice(free, need))
            works.append(_Work(item, before.extended(length, taken), taken))
        return works

    def _run(self, works: list[_Work], features: Sequence[Tensor]) -> Candidates:
        first = [0, *accumulate(len(tensor) for tensor in features)]
        extensions = [work.extension(first) for work in works]
        n = sum(len(extension.rows) for extension in extensions)
        b = sum(extension.bonus is not None for extension in extensions)
        source = _one(features, self._stack) if n else None
        chosen = next(each for each in self._passes if each.blocks >= b)
        if n > (chosen.rows if b else 0):  # prompt chunks go ahead of the blocks
            alone = self._pass(n, 0)
            alone.load([replace(extension, bonus=None) for extension in extensions], source)
            alone.run()
            extensions = [extension.fed() for extension in extensions]
        if not b:
            return self._stack.no_candidates()
        chosen.load(extensions, source)
        candidates = chosen.run()
        return Candidates(candidates.logprobs[:b], candidates.ids[:b])


def _one(features: Sequence[Tensor], stack: Stack) -> Tensor:
    """All features in one tensor as the model wants them; a single one that is so already is not copied."""
    moved = [tensor.to(stack.device, stack.dtype) for tensor in features]
    return moved[0] if len(moved) == 1 else torch.cat(moved)
