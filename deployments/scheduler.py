"""Continuous batching: who runs, who waits, which rows the next step carries. Pure policy: knows no tensors and no Ray.

Decoding sequences go first, each with its tree; what is left of the row budget goes to prompts in order of arrival. Pages
are taken as rows need them; when none is free the sequence that came last gives up its own and is computed again later
(preemption by recompute), so that the oldest always gets on. A sequence that joins takes over the pages that others left
for the tokens it begins with (prefix cache), and leaves its own. It joins when nobody is about to compute such pages: of many
that begin alike and come together, the choices of one request above all, one computes and the others wait for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from ddtree.deployments.sequence import Sequence
from ddtree.verifier.pages import OutOfPages, PageAllocator, page_keys


class QueueFull(RuntimeError):
    """As many requests wait as may."""


class Entry(NamedTuple):  # a tuple: made for every sequence of every round
    """What one step does for one sequence."""

    sequence: Sequence
    rows: int  # decode: 1 + budget; prefill: prompt tokens of this chunk
    budget: int  # draft nodes wanted; 0 for prefill
    finishes: bool  # the target draws a token for it in this step


@dataclass(frozen=True)
class Limits:
    """Sizes the scheduler keeps to. Written from the configuration."""

    max_sequences: int
    max_waiting: int
    prefill_rows: int  # prompt rows per step
    max_positions: int  # a tree never reaches past it
    horizon: int  # deepest node of a tree
    rebuild_window: int  # tokens re-run for a new drafter
    prefix_cache: bool = True


class Scheduler:
    def __init__(self, pages: PageAllocator, limits: Limits) -> None:
        self.pages = pages
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order they joined
        self.preemptions = 0  # since start
        self._steps = 0  # planned since start

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raises QueueFull."""
        if len(self.waiting) >= self.limits.max_waiting:
            raise QueueFull(f"{len(self.waiting)} requests are waiting; try again later")
        self.waiting.append(sequence)

    def drop_cancelled(self) -> list[Sequence]:
        """Forget every cancelled sequence that is in no step, its pages with it."""
        gone = [s for s in [*self.running, *self.waiting] if s.cancelled and not s.flying]
        for sequence in gone:
            self.finish(sequence)
        return gone

    def finish(self, sequence: Sequence, *, damaged: bool = False) -> None:
        """Take a sequence out, running or waiting, and free its pages. `damaged`: nobody is to use its KV rows."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        pages = sequence.pages
        self._release(sequence)
        if damaged:
            self.pages.forget(pages)

    def take_pool(self, pages: PageAllocator) -> None:
        """Go over to another pool, in which nothing is computed yet."""
        for sequence in self.running:
            sequence.pages, sequence.flying = [], False
            sequence.restart_prefill()
        self.pages = pages

    def restart_all(self) -> None:
        """The pool is lost: every running sequence is computed again from its tokens."""
        self.take_pool(PageAllocator(self.pages.pages, self.pages.page_size))

    def rebuild_context(self, sequence: Sequence) -> None:
        """Have the last tokens computed once more, as a prompt is: their features give a new drafter its context."""
        sequence.stored = max(sequence.stored, sequence.computed)
        sequence.computed = self._window_start(sequence)
        sequence.context, sequence.restart = sequence.computed, True

    def rebuild_rows(self, sequence: Sequence) -> int:
        """Prompt rows that `rebuild_context` adds to the next steps."""
        again = sequence.computed - self._window_start(sequence)
        return again + (1 if again and sequence.decoding else 0)

    def free_rows(self) -> int:
        """Prompt rows that the next step has left. Negative where prompts want more than there are."""
        return self.limits.prefill_rows - sum(s.pending for s in self.next_up() if not s.decoding)

    def next_up(self) -> list[Sequence]:
        """Who takes part in the next step, as far as pages allow: those running, and those waiting that will join them."""
        return [*self.running, *self._joining()]

    def _joining(self) -> list[Sequence]:
        """Those waiting that join now: in order of arrival, but for those that wait for somebody's pages."""
        joining: list[Sequence] = []
        room = self.limits.max_sequences - len(self.running)
        if room <= 0 or not self.waiting:
            return joining
        coming = {key for s in self.running if not s.decoding for key in self._unkept(s)}
        for sequence in self.waiting:
            if self._waits_for(sequence, coming):
                continue
            joining.append(sequence)
            if len(joining) == room:
                break
            coming.update(self._unkept(sequence))
        return joining

    def _unkept(self, sequence: Sequence) -> list[bytes]:
        """Its pages that nobody has computed yet."""
        return [key for key in sequence.keys[sequence.kept :] if not self.pages.keeps(key)]

    def _waits_for(self, sequence: Sequence, coming: set[bytes]) -> bool:
        """Whether pages that are `coming` would save it prompt rows. Those in its drafter's window are computed anyway."""
        if not self._looks_up(sequence):
            return False
        if sequence.awaited not in coming:
            sequence.keys = page_keys(sequence.tokens, self.pages.page_size, sequence.keys)
            window = self.limits.rebuild_window if sequence.wants_drafter else 0
            useful = sequence.keys[: max(0, sequence.shareable - window) // self.pages.page_size]
            sequence.awaited = next((key for key in reversed(useful) if key in coming), None)
        return sequence.awaited is not None

    def _looks_up(self, sequence: Sequence) -> bool:
        return self.limits.prefix_cache and sequence.request.prefix_cache and not sequence.pages

    def _window_start(self, sequence: Sequence) -> int:
        return min(sequence.computed, max(0, len(sequence.tokens) - 1 - self.limits.rebuild_window))

    def plan(self, most: int | None = None) -> list[Entry]:
        """The entries of the next step, decoding ones first, of sequences that are in no step. Their pages are allocated. With
        `most`, so many at most: those that had to wait longest of those that there are pages for."""
        if self.waiting:
            self.keep_pages()
        for sequence in self._joining():
            self.waiting.remove(sequence)
            self.running.append(sequence)
            self._take_prefix(sequence)
        self._steps += 1
        rows_left = self.limits.prefill_rows
        entries: list[Entry] = []
        free = [s for s in self.running if not s.flying]  # sorting is stable: arrival order within each kind
        free.sort(key=lambda s: not s.decoding)
        if most is not None:
            free.sort(key=lambda s: s.planned)
        for sequence in free:
            if len(entries) == most:
                break
            if sequence not in self.running:  # preempted on the way
                continue
            entry = self._entry(sequence, rows_left)
            if entry is None or not self._provide(sequence, sequence.computed + entry.rows, entries):
                continue
            if not sequence.decoding:
                rows_left -= entry.rows
            sequence.planned = self._steps
            entries.append(entry)
        if most is not None:
            entries.sort(key=lambda entry: not entry.sequence.decoding)
        return entries

    def _entry(self, sequence: Sequence, rows_left: int) -> Entry | None:
        if sequence.decoding:
            budget = self._budget(sequence)
            return Entry(sequence, 1 + budget, budget, True)
        rows = min(sequence.pending, rows_left)
        return Entry(sequence, rows, 0, rows == sequence.pending) if rows else None

    def _budget(self, sequence: Sequence) -> int:
        past_the_end = sequence.computed + self.limits.horizon >= self.limits.max_positions
        return 0 if past_the_end or sequence.remaining == 1 else sequence.nodes

    def _provide(self, sequence: Sequence, rows: int, entries: list[Entry]) -> bool:
        """Give the sequence pages for `rows` KV rows, from later arrivals if need be. False: it has to wait."""
        while (missing := self.pages.pages_for(rows) - len(sequence.pages)) > 0:
            try:
                sequence.pages += self.pages.allocate(missing)
            except OutOfPages:
                planned = {id(entry.sequence) for entry in entries}
                later = self.running[self.running.index(sequence) + 1 :]
                spared = planned | {id(s) for s in later if s.flying}
                victim = next((s for s in reversed(later) if s.pages and id(s) not in spared), None)
                if victim is None:
                    return False
                self._preempt(victim)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self._release(sequence)
        sequence.restart_prefill()
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._keep(sequence)
        self.pages.free(sequence.pages)
        sequence.pages = []

    def _take_prefix(self, sequence: Sequence) -> None:
        """Give a sequence that has nothing computed the kept pages of its first tokens. Its last token is always computed,
        and so are as many before it as a drafter wants for its context, and what log-probabilities are still to come of."""
        if not self._looks_up(sequence):
            return
        sequence.keys = page_keys(sequence.tokens, self.pages.page_size, sequence.keys)
        usable = sequence.shareable // self.pages.page_size
        sequence.pages = self.pages.share(sequence.keys[:usable])
        sequence.kept = len(sequence.pages)
        sequence.computed = sequence.stored = sequence.kept * self.pages.page_size
        if sequence.computed and sequence.wants_drafter:
            self.rebuild_context(sequence)
        sequence.stats.cached_tokens = max(sequence.stats.cached_tokens, sequence.computed)

    def keep_pages(self) -> None:
        """Offer the pages that became complete. Soon enough while the next step computes; `plan` does it where somebody waits."""
        for sequence in self.running:
            self._keep(sequence)

    def _keep(self, sequence: Sequence) -> None:
        """Offer the sequence's pages that became complete."""
        complete = min(sequence.final, len(sequence.tokens)) // self.pages.page_size
        if not self.limits.prefix_cache or complete <= sequence.kept:
            return
        sequence.keys = page_keys(sequence.tokens, self.pages.page_size, sequence.keys)
        for i in range(sequence.kept, complete):
            self.pages.keep(sequence.pages[i], sequence.keys[i])
        sequence.kept = complete
