"""The round: draft, build, verify, accept, commit, over a batch that sequences join and leave between rounds.

Knows the scheduler, the tree operations and two kinds of peer behind protocols; not how these are reached (links.py does).
A drafter is a hint: whatever it does wrong costs its sequences their drafts, never a token.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from ddtree.deployments.assignment import assign
from ddtree.deployments.batching import Layout, TreeBatch, lay_out
from ddtree.deployments.budgets import Budgets, Choice, Chosen
from ddtree.deployments.costs import StepSize
from ddtree.deployments.drafts import deepened, grown, joined
from ddtree.deployments.errors import GrammarError
from ddtree.deployments.forced import forced
from ddtree.deployments.masks import lay_out_masks
from ddtree.deployments.metrics import Metrics, Totals
from ddtree.deployments.overlap import Mode, Overlap
from ddtree.deployments.requests import Delta, TokenLogprobs, VerifiedRound
from ddtree.deployments.round_curve import size_of
from ddtree.deployments.round_memory import RoundMemory
from ddtree.deployments.scheduler import Entry, Scheduler
from ddtree.deployments.sequence import Accepted, Sequence
from ddtree.deployments.verified import of_prompt, verified
from ddtree.drafter.items import Candidates, DraftItem, FeatureSlice
from ddtree.drafter.noised import noised
from ddtree.kernels import DraftTree, tree_builder, tree_walker
from ddtree.kernels.tree import Allocate
from ddtree.verifier.batch import Logprobs, VerifyBatch, VerifyResult

log = logging.getLogger(__name__)
NOISE_SHARE = 0.65  # of the target's noise that candidates are ranked by (docs/experiments.md)


class PeerLost(RuntimeError):
    """A drafter or the verifier died, hangs or failed."""


class DrafterPeer(Protocol):
    """One drafter replica."""

    id: str

    def start(self, items: list[DraftItem], features: Any) -> None: ...
    def result(self) -> Candidates:
        """Of the items with a bonus. Raises PeerLost."""
        ...

    def release(self, sequences: list[str]) -> None: ...


class VerifierPeer(Protocol):
    """The verifier group. `start` and `result` come in turn."""

    def room(self) -> Allocate | None:
        """Makes tensors that the next batch can hold without a copy. None: any will do, and nothing can be announced."""
        ...

    def announce(self, batch: VerifyBatch) -> None:
        """This will be started, unless another batch is. Its tensors on the device are in `room`, and not written to yet."""
        ...

    def start(self, batch: VerifyBatch) -> None:
        """Raises PeerLost."""
        ...

    def result(self) -> tuple[VerifyResult, Any]:
        """Also gives a reference to the result, which a drafter can read features from. Raises PeerLost."""
        ...


Emit = Callable[[list[tuple[Sequence, Delta | Exception]]], None]


@dataclass
class Round:
    """What one round holds between its stages."""

    entries: list[Entry]
    trees: list[Entry]  # the decoding ones
    budgets: list[int]  # nodes besides the root, by tree
    seconds: dict[str, float] = field(default_factory=dict)
    layout: Layout | None = None  # where rows are known before the draft is
    announced: TreeBatch | None = None  # the batch, then, where the verifier knows of it
    numbers: tuple[Tensor, ...] | None = None  # what trees are built from beside candidates, where that was made ready
    builder: Callable[[Tensor, Tensor], DraftTree] | None = None  # all but the candidates, then
    choice: Choice | None = None  # of nodes, where budgets adapt
    built: DraftTree | None = None  # and what they are to be chosen from
    chosen: Chosen | None = None
    drafted: int = 0  # sequences with a draft
    brought: list[tuple[Sequence, bool]] = field(default_factory=list)  # who got tokens, and whether the last ones


@dataclass(frozen=True)
class Flight:
    """A round whose step the verifier has begun."""

    work: Round
    layout: Layout
    laid: TreeBatch
    walk: Callable[[Iterable[list[int]]], list[list[int]]] | None  # down its trees, by y at their nodes
    started: float
    size: StepSize


@dataclass(frozen=True)
class Drawn:
    """What the target drew, on the host."""

    y: list[int]  # by sampling row
    paths: list[list[int]]  # accepted nodes, by tree


class RoundLoop:
    """Runs rounds over what the scheduler plans. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        scheduler: Scheduler,
        emit: Emit,
        device: torch.device | str = "cpu",
        *,
        shared_noise: bool = True,
        overlap: Mode = "off",
        budgets: Budgets | None = None,
    ) -> None:
        """`device`: where trees are built and walked; where the verifier's results are. `shared_noise`: rank candidates by the
        draw that is to come. `overlap`: see `overlap.Overlap`. `budgets`: for requests whose budget adapts."""
        self.scheduler = scheduler
        self.verifier: VerifierPeer  # set before the first round, and again when the group is replaced
        self.drafters: dict[str, DrafterPeer] = {}
        self._leaving: dict[str, Callable[[], Any]] = {}  # those of them that draft until others have their sequences
        self.totals = Totals()
        self.metrics = Metrics(scheduler.limits.prefix_cache)
        self._emit, self._device, self._shares_noise = emit, torch.device(device), shared_noise
        self._uncounted: list[tuple[Round, list[list[int]]]] = []  # rounds that ended, and what they accepted by tree
        self._outgoing: list[tuple[Sequence, Callable[[], Delta] | Exception]] = []  # leaves while others compute
        self._candidates: tuple[int, int] | None = None  # levels and K of the last, where no tree depends on paths
        self._memory = RoundMemory(self._device, scheduler.limits.max_sequences)
        self._features: Any = None  # reference to the last verify result
        self._new_context: dict[str, FeatureSlice] = {}  # rows of it that a sequence's drafter has not seen
        self._overlap, self._budgets = Overlap(overlap), budgets
        self._unlearned: Callable[[], None] | None = None  # what budgets are to learn of the last round
        self._flight: Flight | None = None

    # -- peers -----------------------------------------------------------------------------------------------------------

    def add_drafter(self, drafter: DrafterPeer) -> None:
        self.drafters[drafter.id] = drafter
        log.info("drafter %s joined, %d in all", drafter.id, len(self.drafters))

    def retire_drafter(self, drafter_id: str, gone: Callable[[], Any]) -> None:
        """It is about to leave: it drafts on while its sequences are handed to others, then it is forgotten and `gone` called."""
        if drafter_id in self.drafters:
            self._leaving[drafter_id] = gone
        else:
            gone()

    def forget_drafter(self, drafter_id: str, why: str) -> None:
        """Its sequences go on with root-only trees until another drafter has their context."""
        if self.drafters.pop(drafter_id, None) is None:
            return
        self._leaving.pop(drafter_id, lambda: None)()
        log.warning("drafter %s forgotten: %s; %d left", drafter_id, why, len(self.drafters))
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            if sequence.drafter == drafter_id:
                sequence.forget_drafter()

    def verifier_lost(self) -> None:
        """Its KV rows are gone: every running sequence is computed again, no token is lost."""
        self._features, self._new_context, self._flight = None, {}, None
        self.scheduler.restart_all()
        self._send()

    def fail_running(self, error: Exception) -> None:
        """A fault in a round: end what was running with the error. Raises PeerLost where the verifier is gone, too."""
        if self._flight:
            self._flight = None
            self.verifier.result()  # of a step that was begun, and is nobody's now
        self._features, self._new_context = None, {}
        self._fail(self.scheduler.running, error)
        self._send()

    def fail_all(self, error: Exception) -> None:
        """Nobody can serve: end what runs and what waits with the error."""
        self.fail_running(error)
        self._fail(self.scheduler.waiting, error)
        self._send()

    def drop_cancelled(self) -> None:
        for sequence in self.scheduler.drop_cancelled():
            self._release(sequence)

    # -- one round -------------------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Begin a round and end one, the same unless rounds overlap. False when there was nothing to do. Raises PeerLost when the
        verifier is gone; a round that was not ended then never happened, as far as any sequence's tokens go."""
        began, before = time.perf_counter(), self.totals.generated_tokens
        self.drop_cancelled()
        self._prepare_budgets()
        self._assign_drafters()
        running = self.scheduler.running
        overlapped = self._overlap.now(len(running) if any(s.drafter for s in running) else 0)
        most = -(-len(running) // 2) if overlapped else None
        # Where rounds stop to overlap, the one under way ends first.
        entries = [] if self._flight and not overlapped else self.scheduler.plan(most)
        if entries:
            self._begin(entries)
        elif self._flight:
            self._feed()
        else:
            self._send()
            return False
        ended = None if entries and overlapped else self._end_round()
        seconds = time.perf_counter() - began
        if ended and entries and self._budgets:
            self._budgets.spent(ended.size, ended.work.seconds, seconds, ended.work.drafted)
        self._overlap.note(seconds, self.totals.generated_tokens - before)
        return True

    def _begin(self, entries: list[Entry]) -> None:
        """Draft, and have the verifier begin once it has ended what it is at."""
        now = time.monotonic()
        for entry in entries:
            if entry.sequence.started is None:
                entry.sequence.started = now
                entry.sequence.stats.queue_seconds = now - entry.sequence.arrival
        trees = [entry for entry in entries if entry.sequence.decoding]
        work = Round(entries, trees, [entry.budget for entry in trees])
        candidates = self._timed(work, "draft", lambda: self._draft(work))
        layout, laid = self._timed(work, "build", lambda: self._build(work, candidates))
        if self._flight:
            self._end_round()
        started = time.perf_counter()
        self.verifier.start(laid.batch)
        self._send()
        self._think(work)
        self.scheduler.keep_pages()
        size = size_of(entries, work.budgets)
        for entry in entries:
            entry.sequence.flying = True
        walk = None if laid.tree is None else tree_walker(laid.tree)
        self._flight = Flight(work, layout, laid, walk, started, size)

    def _end_round(self) -> Flight:
        """Take the result of the step that was begun."""
        assert self._flight
        flight, work, self._flight = self._flight, self._flight.work, None
        result, reference = self.verifier.result()
        work.seconds["commit"] = result.commit_seconds
        work.seconds["verify"] = time.perf_counter() - flight.started - result.commit_seconds
        for entry in work.entries:
            entry.sequence.flying = False
        self._features, self._new_context = reference, {}
        drawn = self._timed(work, "accept", lambda: self._accept(flight, result))
        if self._budgets and work.chosen:
            self._unlearned = partial(self._budgets.note, work.chosen, drawn.paths)
            self.totals.forecast_tokens += sum(work.chosen.expected)
            self.totals.forecast_accepted += sum(len(path) - 1 for path in drawn.paths)
        self._settle(flight, drawn, result.logprobs)
        self._uncounted.append((work, drawn.paths))
        self.totals.rounds += 1
        return flight

    def _timed(self, work: Round, stage: str, run: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        value = run()
        work.seconds[stage] = time.perf_counter() - begin
        return value

    def _think(self, work: Round) -> None:
        """About budgets, while the verifier computes."""
        if self._budgets:
            if self._unlearned:
                self._unlearned()
                self._unlearned = None
            if work.choice and work.built and not work.chosen:  # their nodes were chosen before the draft
                work.chosen = self._budgets.choose(work.choice, work.built)
            self._budgets.think(self.scheduler.running, work.chosen)

    def _prepare_budgets(self) -> None:
        if self._budgets:
            window = self.scheduler.limits.rebuild_window
            for sequence in self._budgets.prepare(self.scheduler.next_up(), window):
                self._release(sequence)
                sequence.forget_drafter()

    def _assign_drafters(self) -> None:
        for sequence, drafter in assign(self.scheduler, [name for name in self.drafters if name not in self._leaving]):
            if sequence.drafter:
                self._release(sequence)
            self._new_context.pop(sequence.id, None)  # meant for another drafter
            sequence.drafter, sequence.context, sequence.restart = drafter, 0, True
            if sequence.computed:
                self.totals.moves += 1
                self.totals.moved_rows += self.scheduler.rebuild_rows(sequence)
                self.scheduler.rebuild_context(sequence)
        held = {sequence.drafter for sequence in self.scheduler.running} if self._leaving else set()
        for drafter in [name for name in self._leaving if name not in held or len(self._leaving) == len(self.drafters)]:
            self.forget_drafter(drafter, "it left")

    def _draft(self, work: Round) -> Candidates | None:
        """Candidates over the decoding entries; a row of −inf and budget 0 where there is no draft. The batch is
        laid out while the drafters work, if it is known by then, and the verifier told of it."""
        items: dict[str, list[DraftItem]] = {}
        wanted: dict[str, list[int]] = {}
        for i, entry in enumerate(work.trees):
            sequence = entry.sequence
            if entry.budget and sequence.drafter:
                items.setdefault(sequence.drafter, []).append(self._item(sequence, bonus=True))
                wanted.setdefault(sequence.drafter, []).append(i)
        self._start_drafts(items)
        drafting = {i for rows in wanted.values() for i in rows}
        expected = [budget if i in drafting else 0 for i, budget in enumerate(work.budgets)]
        work.choice = self._choice(work, expected)
        if not (self._budgets and work.choice and self._budgets.after):
            work.layout = self._lay_out(work, expected, max(self._sizes(work, expected), default=0))
            self._announce(work, expected)
        if items:
            self._send()
        found: list[tuple[list[int], Candidates]] = []
        for drafter_id in items:
            answer = self._drafter_call(drafter_id, lambda drafter: drafter.result())
            if answer is not None and drafter_id in wanted:
                found.append((wanted[drafter_id], answer))
        candidates = self._merge(work, found)
        if work.budgets != expected:  # a draft that was started did not come
            work.layout = work.announced = work.numbers = work.builder = work.choice = None
        return candidates

    def _choice(self, work: Round, budgets: list[int]) -> Choice | None:
        """Of nodes, where any of the drafts is for a tree whose size adapts, and this round's trees are looked at."""
        adapts = (n and entry.sequence.request.adapts for entry, n in zip(work.trees, budgets, strict=True))
        return (
            self._budgets.begin(work.entries, budgets)
            if self._budgets and self._budgets.notes and any(adapts)
            else None
        )

    def _announce(self, work: Round, budgets: list[int]) -> None:
        """Where a batch waits for its trees alone."""
        room = self.verifier.room()
        if room is None or self._flight or not any(budgets) or any(e.sequence.grammar for e in work.entries):
            return
        assert work.layout
        levels, sizes = self.scheduler.limits.horizon, self._sizes(work, budgets)
        tree = DraftTree.allocate(len(sizes), levels, max(sizes), room)
        work.announced = work.layout.batch(tree, empty=room)
        self.verifier.announce(work.announced.batch)
        if self._candidates and self._candidates[0] == levels:  # the last drafts had all depths, as these will
            work.numbers, shape = self._numbers(work, sizes), (len(sizes), *self._candidates)
            work.builder = tree_builder(shape, *work.numbers, max_budget=max(sizes), out=tree)

    def _feed(self) -> None:
        """Give the drafters their new context and ask for nothing: the round that ends next has features of its own."""
        items: dict[str, list[DraftItem]] = {}
        self._start_drafts(items)
        for drafter_id in items:
            self._drafter_call(drafter_id, lambda drafter: drafter.result())

    def _start_drafts(self, items: dict[str, list[DraftItem]]) -> None:
        """Ask the drafters; of sequences that want no draft now (prompts, those left out of a round) feed the context alone."""
        asked = {item.sequence for part in items.values() for item in part}
        for sequence in self.scheduler.running:
            if sequence.drafter and sequence.id in self._new_context and sequence.id not in asked:
                items.setdefault(sequence.drafter, []).append(self._item(sequence, bonus=False))
        self._new_context = {}  # what was not taken is of sequences that begin anew or end
        for drafter_id, part in items.items():
            self._drafter_call(drafter_id, partial(_start, part, self._features))

    def _sizes(self, work: Round, budgets: list[int]) -> list[int]:
        """Nodes that trees are built with, of which so many will be verified. Where these are chosen before the draft it is the
        others that say whether they are enough; a grammar would have to allow what follows each of them."""
        if not (self._budgets and work.choice) or self._budgets.after or any(e.sequence.grammar for e in work.trees):
            return budgets
        adapts = [entry.sequence.request.adapts for entry in work.trees]
        return [max(n, self._budgets.grown) if n and own else n for n, own in zip(budgets, adapts, strict=True)]

    def _lay_out(self, work: Round, budgets: list[int], size: int) -> Layout:
        """With trees built with up to `size` nodes, of which so many are verified."""
        pages = self.scheduler.pages
        return lay_out(work.entries, budgets, size + 1, pages.page_size, scratch_page=pages.pages)

    def _drafter_call(self, drafter_id: str, call: Callable[[DrafterPeer], Any]) -> Any:
        drafter = self.drafters.get(drafter_id)
        if drafter is None:
            return None
        try:
            return call(drafter)
        except PeerLost as error:
            self.forget_drafter(drafter_id, str(error))
            return None

    def _item(self, sequence: Sequence, bonus: bool) -> DraftItem:
        new = self._new_context.get(sequence.id)
        restart, sequence.restart = sequence.restart, False
        token = sequence.tokens[-1] if bonus else None
        return DraftItem(sequence.id, restart, [new] if new else [], token, sequence.computed, sequence.levels)

    def _merge(self, work: Round, found: list[tuple[list[int], Candidates]]) -> Candidates | None:
        drafted = {i for rows, _ in found for i in rows}
        for i, entry in enumerate(work.trees):
            if i not in drafted:
                self.totals.fallbacks += entry.budget > 0
                entry.sequence.stats.fallback_rounds += entry.budget > 0
                work.budgets[i] = 0
        work.drafted = len(drafted)
        return joined(found, len(work.trees), self._device) if found else None

    def _build(self, work: Round, candidates: Candidates | None) -> tuple[Layout, TreeBatch]:
        """The batch with its trees, and with what grammars allow at their nodes. Where nothing was drafted every tree is its
        root."""
        room = None if work.announced else self.verifier.room()
        tree = None if candidates is None else self._trees(work, forced(candidates, work.trees), room)
        size = 0 if tree is None else tree.tokens.shape[1] - 1
        layout, laid = work.layout or self._lay_out(work, work.budgets, size), work.announced
        if laid is None:
            masks = lay_out_masks(work.entries, layout.row_offsets, layout.trees, layout.drawn, tree)
            laid = layout.batch(tree, masks, room)
        laid.gather()
        return layout, laid

    def _trees(self, work: Round, candidates: Candidates, room: Allocate | None) -> DraftTree | None:
        work.choice = work.choice or self._choice(work, work.budgets)
        sizes = self._sizes(work, work.budgets)
        numbers = work.numbers or self._numbers(work, sizes)
        draws = [entry.sequence.request.sampling for entry in work.trees]
        if self._shares_noise and not all(p.greedy for p in draws):
            scales = [0.0 if p.greedy else NOISE_SHARE * p.temperature for p in draws]
            seeds, scale = self._memory.draws([p.seed for p in draws], scales)
            candidates = noised(candidates, seeds, numbers[1], scale)
        if work.announced:
            candidates = deepened(candidates, self.scheduler.limits.horizon)
        _, levels, k = candidates.ids.shape
        before, self._candidates = self._candidates, (levels, k) if candidates.conditional is None else None
        if work.builder and before == self._candidates:
            tree = work.builder(candidates.logprobs, candidates.ids)
        else:
            out = work.announced.tree if work.announced else None
            if room and not work.choice:
                out = DraftTree.allocate(len(sizes), levels, max(sizes), room)
            tree = grown(candidates, numbers, max(sizes), out)
        work.built = tree
        if self._budgets and work.choice and self._budgets.after:
            work.chosen = self._budgets.choose(work.choice, tree)
            work.budgets = work.chosen.nodes
        return tree if any(work.budgets) else None

    def _numbers(self, work: Round, budgets: list[int]) -> tuple[Tensor, ...]:
        """root, seq_len and budget of the trees [B]."""
        sequences = [entry.sequence for entry in work.trees]
        return self._memory.numbers([s.tokens[-1] for s in sequences], [s.computed for s in sequences], budgets)

    def _accept(self, flight: Flight, result: VerifyResult) -> Drawn:
        """The walk down each tree."""
        y, trees = result.drawn.tolist(), flight.layout.trees
        if flight.walk is None:
            return Drawn(y, [[0]] * trees)
        spans = pairwise(flight.layout.row_offsets[: trees + 1])
        return Drawn(y, flight.walk(y[begin:end] for begin, end in spans))

    def _settle(self, flight: Flight, drawn: Drawn, logprobs: Logprobs | None) -> None:
        """Move every sequence on by its rows, and hand out its new tokens."""
        work, layout = flight.work, flight.layout
        decoding = len(work.trees)
        for i, entry in enumerate(work.entries):
            sequence, first, base = entry.sequence, layout.row_offsets[i], entry.sequence.computed
            if i < decoding:
                path = drawn.paths[i]
                rows = [first + node for node in path]
                sequence.accepted = Accepted(base, path)
                tokens = [drawn.y[row] for row in rows]
            else:
                path = list(range(entry.rows))
                rows = list(range(first, first + entry.rows))
                sequence.accepted = None
                tokens = [drawn.y[layout.row_offsets[decoding] + layout.drawn.index(i)]] if entry.finishes else []
                sequence.stats.prefill_seconds += sum(work.seconds.values())
            found: list[TokenLogprobs] = []
            if layout.logprobs and logprobs:
                found = layout.logprobs.of_drawn(i, path if i < decoding else [0], logprobs)
                of_prompt = layout.logprobs.of_prompt(i, logprobs)
                sequence.take_prompt_logprobs(of_prompt)
                if any(math.isnan(one.logprob) for one in of_prompt):
                    tokens = [-1]
            sequence.computed = base + len(path)
            self._note_features(sequence, base, rows)
            if tokens:
                told = self._told(flight, i, path, tokens) if sequence.request.tells_rounds else None
                self._deliver(work, sequence, tokens, found, told)

    def _told(self, flight: Flight, i: int, path: list[int], tokens: list[int]) -> VerifiedRound:
        """The round of entry i, for who asks for it."""
        work = flight.work
        if i >= len(work.trees):
            return of_prompt(tokens[-1], work.seconds)
        root = work.entries[i].sequence.tokens[-1]
        return verified(flight.laid.tree, i, work.budgets[i], root, path, tokens[-1], work.seconds)

    def _note_features(self, sequence: Sequence, base: int, rows: list[int]) -> None:
        """The drafter takes these rows of the result next time; what it already has is left out, and what it has no
        positions for."""
        if sequence.drafter is None or base + len(rows) > self.scheduler.limits.max_positions:
            return
        new = rows[max(0, sequence.context - base) :]
        if new:
            self._new_context[sequence.id] = FeatureSlice(0, new, base + len(rows) - len(new))
            sequence.context = base + len(rows)

    def _count(self, work: Round, paths: list[list[int]]) -> None:
        for entry, budget, path in zip(work.trees, work.budgets, paths, strict=True):
            stats, length = entry.sequence.stats, len(path)
            stats.rounds += 1
            stats.drafted_tokens += budget
            stats.accepted_tokens += length - 1
            stats.acceptance_histogram += [0] * (length - len(stats.acceptance_histogram))
            stats.acceptance_histogram[length - 1] += 1
            for stage, seconds in work.seconds.items():
                stats.stage_seconds[stage] += seconds
            self.totals.drafted_tokens += budget
            self.totals.accepted_tokens += length - 1
            self.metrics.tree(budget, length - 1)
        for sequence, finished in work.brought:
            self.metrics.delivered(sequence, finished)
        self.metrics.round(work.seconds)

    def _deliver(
        self,
        work: Round,
        sequence: Sequence,
        tokens: list[int],
        logprobs: list[TokenLogprobs],
        told: VerifiedRound | None,
    ) -> None:
        if -1 in tokens:
            error = RuntimeError("the target's logits for this request are not finite")
            self._end(sequence, damaged=True)
            self._outgoing.append((sequence, error))
            return
        taken, reason = sequence.append(tokens, logprobs)
        if sequence.grammar:
            try:
                sequence.grammar.advance(taken)
            except GrammarError as error:
                self._end(sequence)
                self._outgoing.append((sequence, RuntimeError(f"the grammar became too much to follow: {error}")))
                return
        self.totals.generated_tokens += len(taken)
        work.brought.append((sequence, reason is not None))
        if reason:
            self._end(sequence)
        if reason or sequence.request.every_round:
            self._outgoing.append((sequence, partial(_delta, sequence, reason, told and told.within(len(taken)))))

    def _fail(self, sequences: Iterable[Sequence], error: Exception) -> None:
        for sequence in list(sequences):
            self._end(sequence, damaged=True)
            self._outgoing.append((sequence, error))

    def _send(self) -> None:
        """What sequences have got, to who waits for it, and into the figures. It takes the host's time, so it waits until a peer
        computes."""
        for work, paths in self._uncounted:
            self._count(work, paths)
        self._uncounted = []
        if self._outgoing:
            self._emit([(who, what if isinstance(what, Exception) else what()) for who, what in self._outgoing])
            self._outgoing = []

    def _end(self, sequence: Sequence, *, damaged: bool = False) -> None:
        self.scheduler.finish(sequence, damaged=damaged)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._new_context.pop(sequence.id, None)
        if sequence.drafter:
            self._drafter_call(sequence.drafter, lambda drafter: drafter.release([sequence.id]))


def _delta(sequence: Sequence, reason: str | None, told: VerifiedRound | None) -> Delta:
    """All that it has got and that nobody has heard of; `reason` where it is the last."""
    found = tuple(sequence.unsent_logprobs), tuple(sequence.unsent_prompt_logprobs)
    delta = Delta(tuple(sequence.unsent), reason, sequence.stats.copy(), *found, told)
    for sent in (sequence.unsent, sequence.unsent_logprobs, sequence.unsent_prompt_logprobs):
        sent.clear()
    return delta


def _start(items: list[DraftItem], features: Any, drafter: DrafterPeer) -> None:
    drafter.start(items, features)
