"""A pod in simulated time: its batch, and what each of its rounds carries and takes. Knows no clock and no other pod.

It keeps to the rules of `deployments/scheduler.py` (decoding sequences first, then prompts in order of arrival under the row
budget), and drafters are given out by the service's own `assign`. Different from the service: a sequence joins when the pool
has room for all of its tokens, so none is ever preempted; no prompts begin alike; rounds do not overlap; what a prompt's
chunks cost a drafter is left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from ddtree.deployments.assignment import assign
from ddtree.deployments.budgets import OFF_ROUNDS, SMOOTH
from ddtree.deployments.costs import StepSize
from ddtree.deployments.scheduler import Scheduler

from .choice import Choice, Draws
from .figures import Figures
from .processes import Drafter, Process
from .profile import Profile

LEAST = 0.01  # slowness of drafts, where they came to nothing at once


@dataclass(slots=True, eq=False)
class Stream:
    """A request on its way. Its `pending` tokens have no KV rows yet; it decodes with one, once its answer has begun."""

    arrival: float  # s
    prompt: int
    answer: int
    pending: int
    generated: int = 0
    first: float | None = None  # when its first token came
    delivered: float = 0.0  # and the last ones
    drafter: Drafter | None = None
    wants_drafter: bool = True  # what `assign` asks of a sequence
    cancelled: bool = False
    flying: bool = False

    @property
    def decoding(self) -> bool:
        return self.pending == 1 and self.generated > 0

    @property
    def remaining(self) -> int:
        return self.answer - self.generated

    @property
    def computed(self) -> int:
        return self.prompt + self.generated - self.pending


@dataclass(frozen=True)
class Round:
    """One under way."""

    trees: list[Stream]  # that have more than a root
    plain: list[Stream]  # that decode without
    chunks: list[tuple[Stream, int]]  # prompts, and their rows
    budget: int  # nodes of each tree
    size: StepSize


class Pod:
    """`begin` and `end` in turn."""

    def __init__(
        self,
        profile: Profile,
        choice: Choice,
        draws: Draws,
        verifier: Process,
        drafters: Sequence[Drafter],
        figures: Figures,
    ) -> None:
        self.limits, self.verifier, self._figures = profile.limits, verifier, figures
        self.waiting: deque[Stream] = deque()
        self.running: list[Stream] = []
        self.round: Round | None = None
        self._costs, self._choice, self._draws, self.drafters = profile.costs, choice, draws, list(drafters)
        self._lives = {drafter: drafter.lives for drafter in drafters}
        self._drafting = profile.budget != 0
        self._held = 0  # KV tokens
        self._slowness: float | None = None  # of drafts, averaged over rounds; None: they are to be tried
        self._undrafted = 0  # rounds since drafts were found not to pay
        self._settled = False  # nothing has happened since that would have drafters given out anew

    # -- what `assign` asks of a scheduler ---------------------------------------------------------------------------------

    def next_up(self) -> list[Stream]:
        return self.running

    def free_rows(self) -> int:
        return self.limits.prefill_rows - sum(s.pending for s in self.running if not s.decoding)

    def rebuild_rows(self, stream: Stream) -> int:
        again = self._again(stream)
        return again + (1 if again and stream.decoding else 0)

    def _again(self, stream: Stream) -> int:
        """Of its computed rows, those within the window that a new drafter's context is made of."""
        return max(0, min(stream.computed, self.limits.rebuild_window + 1 - stream.pending))

    # -- a round -----------------------------------------------------------------------------------------------------------

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    def take(self, stream: Stream) -> bool:
        """Queue it. False: as many wait as may."""
        if len(self.waiting) >= self.limits.max_waiting:
            return False
        stream.wants_drafter = self._drafting
        self.waiting.append(stream)
        return True

    def begin(self, now: float) -> float | None:
        """Begin a round. Returns when it ends, or when a verifier that is down is back; None: there is nothing to do."""
        self._join()
        if not self.running:
            return None
        if (back := self.verifier.ready(now)) > now:
            return back
        self._give_drafters(now)
        self.round, end = self._round(now)
        self._figures.ran(now, min(end, self.verifier.down))
        if end <= self.verifier.down:
            return end
        self.round = None  # it never happened
        for stream in self.running:
            stream.pending = stream.prompt + stream.generated
        return self.verifier.up

    def end(self, now: float) -> int:
        """What the round has brought. Returns how many streams are done."""
        work, self.round = self.round, None
        if work is None:
            return 0
        for stream in work.trees:
            self._deliver(stream, 1 + self._draws.accepted(work.budget), now)
        for stream in work.plain:
            self._deliver(stream, 1, now)
        for stream, rows in work.chunks:
            stream.pending -= rows
            if not stream.pending:
                stream.pending = 1
                self._deliver(stream, 1, now)
        before = len(self.running)
        self.running = [stream for stream in self.running if stream.remaining]
        if done := before - len(self.running):
            self._settled = False
            self._held = sum(stream.prompt + stream.answer for stream in self.running)
        return done

    def _deliver(self, stream: Stream, tokens: int, now: float) -> None:
        tokens = min(tokens, stream.remaining)
        stream.generated += tokens
        self._figures.delivered(stream, tokens, now)

    def _join(self) -> None:
        while self.waiting and len(self.running) < self.limits.max_sequences:
            size = self.waiting[0].prompt + self.waiting[0].answer
            if self.running and self._held + size > self.limits.kv_tokens:
                return
            self.running.append(self.waiting.popleft())
            self._held += size
            self._settled = False

    def _give_drafters(self, now: float) -> None:
        here = []
        for drafter in self.drafters:
            if (up := drafter.ready(now) <= now) and drafter.lives == self._lives[drafter]:
                here.append(drafter)
                continue
            self._lives[drafter], self._settled = drafter.lives, False
            here += [drafter] if up else []
            for stream in self.running:
                if stream.drafter is drafter:
                    stream.drafter = None
        if self._settled:
            return
        for stream, new in cast("list[tuple[Stream, Drafter]]", assign(cast(Scheduler, self), cast("list[str]", here))):
            stream.drafter = new
            stream.pending += self._again(stream)
        self._settled = not (here and self._drafting) or all(stream.drafter for stream in self.running)

    def _round(self, now: float) -> tuple[Round, float]:
        """And when it ends."""
        decoding = [stream for stream in self.running if stream.decoding]
        context = sum(stream.computed for stream in decoding)
        budget = self._choice.budget(len(decoding), context, self._slowness or 1.0) if decoding else 0
        trees, ready = self._draft(decoding, now) if budget else ([], now)
        self._undrafted = 0 if budget else self._undrafted + 1
        if self._undrafted == OFF_ROUNDS:
            self._slowness, self._undrafted = None, 0
        plain = decoding
        if trees:
            drafted = set(trees)
            plain = [stream for stream in decoding if stream not in drafted]
        chunks, left = [], self.limits.prefill_rows
        for stream in self.running:
            if left and not stream.decoding:
                chunks.append((stream, min(stream.pending, left)))
                left -= chunks[-1][1]
        in_trees = context if not plain else sum(stream.computed for stream in trees)
        size = StepSize(
            rows=len(decoding) + budget * len(trees) + sum(rows for _, rows in chunks),
            sequences=len(decoding) + len(chunks),
            trees=len(trees),
            read=context + sum(stream.computed for stream, _ in chunks),
            attended=context + budget * in_trees + sum(rows * stream.computed for stream, rows in chunks),
        )
        seconds = self._costs.rest_s(size.sequences) + self._costs.verify_s(size)
        return Round(trees, plain, chunks, budget, size), ready + seconds

    def _draft(self, decoding: list[Stream], now: float) -> tuple[list[Stream], float]:
        """Streams that have a draft, and when all drafters have answered."""
        asked: dict[Drafter, list[Stream]] = {}
        for stream in decoding:
            if stream.drafter and stream.remaining > 1:
                asked.setdefault(stream.drafter, []).append(stream)
        found: list[Stream] = []
        ready, alone = now, self._costs.draft_s(*_sums([s for streams in asked.values() for s in streams]))
        for drafter, streams in asked.items():
            seconds = self._costs.draft_s(*_sums(streams))
            done, drafted = drafter.draft(now, seconds)
            ready = max(ready, done)
            if drafted:
                found += streams
                self._figures.drafted(done - seconds, done)
        if alone:
            slowness = max((ready - now) / alone, LEAST)
            self._slowness = (
                slowness if self._slowness is None else self._slowness + SMOOTH * (slowness - self._slowness)
            )
        return found, ready


def _sums(streams: list[Stream]) -> tuple[int, int]:
    """How many, and tokens of context."""
    return len(streams), sum(stream.computed for stream in streams)
