"""Who drafts for whom: which sequences get a drafter, or another one, before a round. Pure policy: knows no tensors and no Ray.

A sequence whose drafter changes has its last tokens computed once more, as part of a prompt is, for the new one's context. That
must not hold up anybody's tokens, so a step makes as many changes as it has rows left beside the prompts; who has to wait goes on
as it is, with the drafter it has or without drafts.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from ddtree.deployments.scheduler import Scheduler
from ddtree.deployments.sequence import Sequence

SPREAD = 4  # drafters are uneven when one has a SPREAD-th of the busiest one's sequences less, and two at least


def assign(scheduler: Scheduler, drafters: Collection[str]) -> list[tuple[Sequence, str]]:
    """The changes to make now: sequences and their new drafters.

    Args:
        scheduler: not changed; `rebuild_context` is for the caller, of every sequence that has rows computed.
        drafters: ids of those that are here to stay. A sequence of any other one is moved.
    """
    if not drafters:
        return []
    sequences = [s for s in scheduler.next_up() if s.wants_drafter and not s.cancelled and not s.flying]
    return _Assignment(scheduler, sequences, drafters).changes()


class _Assignment:
    """The changes before one round."""

    def __init__(self, scheduler: Scheduler, sequences: list[Sequence], drafters: Collection[str]) -> None:
        self._scheduler, self._sequences = scheduler, sequences
        self._untouched = scheduler.limits.prefill_rows
        self._changes: list[tuple[Sequence, str]] = []
        self._load = dict.fromkeys(drafters, 0)
        for sequence in sequences:
            if sequence.drafter in self._load:
                self._load[sequence.drafter] += 1

    @cached_property
    def _rows(self) -> int:
        """That are left. Most rounds change nothing and need not know."""
        return self._scheduler.free_rows()

    def changes(self) -> list[tuple[Sequence, str]]:
        without = [s for s in self._sequences if s.drafter not in self._load]
        for sequence in sorted(without, key=lambda s: s.drafter is not None):  # a drafter that leaves still drafts
            if self._fits(sequence):
                self._give(sequence, self._idlest())
        while move := self._to_move():
            assert move.drafter is not None
            self._load[move.drafter] -= 1
            self._give(move, self._idlest())
        return self._changes

    def _idlest(self) -> str:
        return min(self._load, key=self._load.__getitem__)

    def _to_move(self) -> Sequence | None:
        """The sequence that evens out the drafters' load best: of the busiest one's that with most left to gain from it."""
        busiest = max(self._load, key=self._load.__getitem__)
        gap = self._load[busiest] - self._load[self._idlest()]
        if gap < 2 or SPREAD * gap < self._load[busiest]:
            return None
        moved = {id(sequence) for sequence, _ in self._changes}
        worth = [
            s
            for s in self._sequences
            if s.drafter == busiest
            and s.remaining > self._scheduler.limits.horizon
            and id(s) not in moved
            and self._fits(s)
        ]
        return max(worth, key=lambda s: s.remaining, default=None)

    def _fits(self, sequence: Sequence) -> bool:
        rows = self._scheduler.rebuild_rows(sequence)
        return not rows or rows <= self._rows or self._rows == self._untouched

    def _give(self, sequence: Sequence, drafter: str) -> None:
        self._rows -= self._scheduler.rebuild_rows(sequence)
        self._load[drafter] += 1
        self._changes.append((sequence, drafter))
