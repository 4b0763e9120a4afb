"""How many nodes each tree of a round gets, and whether drafting pays at all: where tokens per second are highest by what nodes
are worth (gains.py) and rounds cost (costs.py). For requests whose budget is `auto`. Pure policy: knows no peers.

Nodes of all trees compete: the next one taken is that with the highest chance of being accepted, less what its context costs,
and as many are taken as give the most expected tokens per second, looked for over the whole curve. A batch for which that is no
more than plain decoding gives goes on without drafts, and so does a sequence whose own drafts are not worth theirs. A context
that was given up is computed again when drafting seems to pay, which may take a small part of the time only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ddtree.deployments.costs import Costs, Numbers, StepSize
from ddtree.deployments.gains import Gains, Worth
from ddtree.deployments.scheduler import Entry
from ddtree.deployments.sequence import Record, Sequence
from ddtree.kernels import DraftTree

LEVELS = (2, 4, 8)  # depths that a draft may have beside all; fewer of them cost less
WHOLE = 32  # rounds between two whose drafts have all depths, to see what is missed
SAMPLES = 64  # drafts that stand for those to come
SMOOTH = 0.1  # weight of a round in what is averaged over rounds
BACK = 1.05  # so much better than plain decoding drafts must promise to be before they are made again
TRIES = 4  # of different drafts, for a forecast without one
LOOK = 16  # rounds between two looks at what drafts would give
UNLUCKY = 0.5  # times the forecast
REST = 64  # rounds that a sequence goes on without drafts when its own did not pay; twice as many each further time
OFF_ROUNDS = 400  # rounds without drafts, until some are made whatever they promise: their cost may have changed
REBUILDING = 0.01  # part of the time that may be spent on contexts that were given up
SAVED_S = 2.0  # of that time, what is kept for later
ROOM = 4  # trees are built with so many times the nodes that they got of late: a draft may be good
LEAST = 8  # and so many more
FADE = 0.95  # by round, of what a sequence's record counts


def size_of(entries: Iterable[Entry], budgets: Iterable[int]) -> StepSize:
    """Of a step of these entries, the first of which have trees of so many nodes besides the root."""
    nodes = list(budgets)
    sized = [
        (1 + nodes[i] if i < len(nodes) else entry.rows, entry.sequence.computed) for i, entry in enumerate(entries)
    ]
    rows, read = sum(rows for rows, _ in sized), sum(seen for _, seen in sized)
    return StepSize(rows, len(sized), sum(n > 0 for n in nodes), read, sum(rows * seen for rows, seen in sized))


@dataclass(frozen=True)
class Selection:
    """What `select` found."""

    nodes: list[int]  # by tree
    tokens: float  # that the step is expected to give
    seconds: float  # that the round is expected to take
    without: float  # that it would take without these nodes


def select(gains: Numbers, prices: Numbers, seconds: Numbers, sure: float, rate: float) -> Selection:
    """The nodes for which tokens - rate * seconds is largest: where `rate` is the best tokens per second that rounds like this
    one can give, these give it (Dinkelbach's theorem). A round that takes long for other reasons gets no larger trees for that.

    Args:
        gains: [B, N] probability of acceptance by tree and node. A tree gets its first so many nodes.
        prices: [B] seconds that a node of this tree takes beside the rows' own.
        seconds: [B * N + 1] of the round with so many nodes in all, prices left out.
        sure: tokens that the step gives without them.
        rate: tokens per second that a second is worth.
    """
    trees, nodes = gains.shape
    wish = np.minimum.accumulate(gains, axis=1) - rate * prices[:, None]
    order = np.argsort(-wish, axis=None, kind="stable")  # among equals a tree's own nodes keep their order
    tokens = sure + np.concatenate([[0.0], np.cumsum(gains.reshape(-1)[order])])
    taken = seconds + np.concatenate([[0.0], np.cumsum(np.repeat(prices, nodes)[order])])
    best = int(np.argmax(tokens - rate * taken))
    counts = np.bincount(order[:best] // max(nodes, 1), minlength=trees)
    return Selection(counts.tolist(), float(tokens[best]), float(taken[best]), float(taken[0]))


@dataclass(frozen=True)
class Chosen:
    """What a round's trees got. Written by `Budgets.choose`."""

    worth: Worth
    nodes: list[int]  # by tree
    expected: list[float]  # draft tokens accepted, by tree


@dataclass(frozen=True)
class _Sample:
    """A tree that was drafted to the full depth."""

    gains: Numbers  # [N]
    depths: NDArray[np.int64]  # [N]

    def within(self, levels: int) -> Numbers:
        """Gains of the nodes of the first depths."""
        kept: Numbers = self.gains[self.depths <= levels]
        return kept


@dataclass(frozen=True)
class _Step:
    """What is given of a step when nodes are chosen."""

    entries: list[Entry]  # those with trees first
    nodes: list[int]  # of the trees that are not to be chosen; 0 of those that are
    fixed: float  # draft tokens that the former are expected to have accepted
    drafted: int  # sequences
    levels: int  # depths of the drafts


class Budgets:
    """`prepare`, then for a round with drafts `choose` and `note`."""

    def __init__(self, costs: Costs, most: int, horizon: int) -> None:
        """`most` nodes a tree may have, none of them deeper than `horizon`."""
        self.costs, self.most, self._horizon = costs, most, horizon
        self._options = sorted({horizon, *(levels for levels in LEVELS if levels < horizon)})
        self._levels = self._asked = horizon  # depths of drafts from now on, and of this round's
        self._gains = Gains()
        self._samples: dict[bool, deque[_Sample]] = {kind: deque(maxlen=SAMPLES) for kind in (False, True)}
        self._concerned = False  # whether any budget of this round adapts
        self._drafts = True  # whether anybody is drafted for
        self._rounds, self._until = 0, 0  # rounds so far, and when drafts are tried again at the latest
        self._worth = BACK  # times the tokens per second of plain decoding that drafts give, prompts left out, averaged
        self._nodes = float(most)  # of a tree, averaged
        self._allowance = SAVED_S  # seconds that contexts may be computed again

    def prepare(self, sequences: list[Sequence], rebuild_rows: int) -> list[Sequence]:
        """Before a round is planned: how many nodes each sequence's tree may have, and who is to have a drafter. Returns those
        that give theirs up. A sequence that is to have one again computes so many rows for it."""
        ours = [s for s in sequences if s.request.adapts and not s.flying]
        self._concerned = bool(ours)
        if not ours:
            self._asked = self._horizon
            return []
        promising = self._look(ours)
        others = any(s.wants_drafter for s in sequences if not s.request.adapts)  # who get all depths
        self._asked = self._horizon if others or self._rounds % WHOLE == 0 else self._levels
        given_up = []
        for sequence in ours:
            if sequence.record is None:
                sequence.record, sequence.wants_drafter = Record(), self._drafts
            elif sequence.wants_drafter and not (self._drafts and sequence.record.pays >= 1):
                self._rest(sequence)
                given_up.append(sequence)
            elif not sequence.wants_drafter:
                sequence.record.rest -= 1
                if promising and sequence.record.rest < 0 and self._affords(rebuild_rows):
                    sequence.record, sequence.wants_drafter = Record(failures=sequence.record.failures), True
            sequence.nodes = min(self.most, LEAST + int(ROOM * self._nodes)) if sequence.wants_drafter else 0
            sequence.levels = self._asked
        if self._drafts and not any(s.wants_drafter for s in ours):
            self._end_drafts()
        return given_up

    def choose(
        self, entries: list[Entry], budgets: list[int], tree: DraftTree, candidates: tuple[Tensor, Tensor]
    ) -> Chosen:
        """How many of its tree's nodes each sequence gets; the first entries have the trees.

        Args:
            budgets: nodes of the trees by what they were built for; a sequence that does not adapt keeps them, and so do all
                as long as no step was timed.
            candidates: log-probs and ids [B, L, K] that they were built from.
        """
        sequences = [entry.sequence for entry in entries[: len(budgets)]]
        worth = self._gains.worth(tree, *candidates, [not s.request.sampling.greedy for s in sequences])
        luck = np.array([s.record.luck if s.record else 1.0 for s in sequences])
        gains = np.minimum(worth.gains * luck[:, None], 1.0)
        nodes = list(budgets)
        timed = self.costs.step.known
        ours = [i for i, s in enumerate(sequences) if timed and s.request.adapts and budgets[i]]
        if ours:
            for i in ours:
                nodes[i] = 0
                if self._asked == self._horizon:
                    sample = _Sample(worth.gains[i], worth.depths[i])
                    self._samples[not sequences[i].request.sampling.greedy].append(sample)
            fixed = sum(gains[i, : nodes[i]].sum() for i in range(len(nodes)))
            drafted = sum(budget > 0 for budget in budgets)
            adapting = [sequences[i] for i in ours]
            step = _Step(entries, nodes, fixed, drafted, self._asked)
            found, plain = self._best(gains[ours], adapting, step, self._worth)
            for i, count in zip(ours, found.nodes, strict=True):
                nodes[i] = count
            self._learn(found, plain, adapting, gains[ours], step)
        expected = [float(gains[i, :count].sum()) for i, count in enumerate(nodes)]
        return Chosen(worth, nodes, expected)

    def note(self, chosen: Chosen, sequences: list[Sequence], paths: list[list[int]]) -> None:
        """These paths of the trees were accepted."""
        self._gains.note(chosen.worth, chosen.nodes, paths)
        for sequence, expected, path in zip(sequences, chosen.expected, paths, strict=True):
            if record := sequence.record:
                record.expected = FADE * record.expected + expected
                record.accepted = FADE * record.accepted + len(path) - 1

    def spent(self, size: StepSize, stages: dict[str, float], whole: float, drafted: int) -> None:
        """A round took `whole` seconds; so many of its sequences were drafted for. Nothing is learned from one in which no budget
        adapts: it should not pay for what it does not use."""
        if not self._concerned:
            return
        self._allowance = min(SAVED_S, self._allowance + REBUILDING * whole)
        self.costs.observe(size, stages, whole, drafted, self._asked)

    def _look(self, ours: list[Sequence]) -> bool:
        """Whether this is a moment to draft for sequences that are not drafted for. Ends drafts that do not pay."""
        self._rounds += 1
        if self._drafts and self._worth < 1:
            self._end_drafts()
        decoding = [s for s in ours if s.decoding]
        if self._rounds % LOOK or not decoding:
            return False
        promises = {levels: self._promise(decoding, levels) for levels in self._options}
        best = max(promises.values())
        self._levels = min(levels for levels, promise in promises.items() if promise == best)
        if best == inf:  # nothing is known
            self._levels = self._horizon
        promising = best > BACK
        if not self._drafts and (promising or self._rounds >= self._until):
            self._drafts, self._worth, promising = True, BACK, True
        return promising

    def _affords(self, rows: int) -> bool:
        """Takes what so many rows cost from the allowance, if there is as much."""
        cost = float(self.costs.step.rows(rows))
        if self._allowance < cost:
            return False
        self._allowance -= cost
        return True

    def _end_drafts(self) -> None:
        self._drafts, self._until = False, self._rounds + OFF_ROUNDS

    def _rest(self, sequence: Sequence) -> None:
        record = sequence.record
        assert record
        sequence.wants_drafter = False
        if record.luck < UNLUCKY:  # its own drafts are to blame, not the load
            record.rest = REST << min(record.failures, 6)
            record.failures += 1

    def _promise(self, sequences: list[Sequence], levels: int) -> float:
        """Times the tokens per second of plain decoding that drafts like the last ones would give these, with so many depths."""
        kinds = [self._samples[not s.request.sampling.greedy] for s in sequences]
        if not all(kinds) or not self.costs.step.known:
            return inf
        entries = [Entry(s, 1, 0, True) for s in sequences]
        gains = np.zeros((len(sequences), self.most))
        ratios = []
        for turn in range(TRIES):
            for i, kind in enumerate(kinds):
                row = kind[(i + turn * len(kind) // TRIES) % len(kind)].within(levels)
                gains[i, : len(row)], gains[i, len(row) :] = row, 0.0
            step = _Step(entries, [0] * len(entries), 0.0, len(entries), levels)
            found, plain = self._best(gains, sequences, step, worth=1.0)
            ratios.append(found.tokens / found.seconds / plain)
        return sum(ratios) / TRIES

    def _best(self, gains: Numbers, ours: list[Sequence], step: _Step, worth: float) -> tuple[Selection, float]:
        """The best nodes for these sequences beside a step, where drafts give `worth` times the tokens per second of plain
        decoding; and these."""
        costs, entries, trees = self.costs, step.entries, step.entries[: len(step.nodes)]
        size, alone = size_of(entries, step.nodes), size_of(trees, step.nodes)
        rest = costs.step.beside(size) + float(costs.rest(len(entries)))
        rows = costs.step.rows(size.rows + np.arange(gains.size + 1))
        rows[1:] += costs.step.per_tree * len(ours)
        undrafted = costs.draft(step.drafted - len(ours), step.levels) + float(costs.rest(len(trees)))
        plain = (len(trees) + step.fixed) / (float(costs.step.rows(alone.rows)) + costs.step.beside(alone) + undrafted)
        prices = costs.step.per_attended * np.array([s.computed for s in ours], np.float64)
        sure = sum(entry.finishes for entry in entries) + step.fixed
        seconds = rest + costs.draft(step.drafted, step.levels) + rows
        return select(gains, prices, seconds, sure, worth * plain), plain

    def _learn(self, found: Selection, plain: float, ours: list[Sequence], gains: Numbers, step: _Step) -> None:
        """What the choice says of drafting for this batch, and for each of its sequences."""
        if len(step.entries) == len(step.nodes):  # no prompts beside the trees
            self._worth += SMOOTH * (found.tokens / found.seconds / plain - self._worth)
        total = sum(found.nodes)
        self._nodes += SMOOTH * (total / len(ours) - self._nodes)
        one_draft = self.costs.draft(step.drafted, step.levels) - self.costs.draft(step.drafted - 1, step.levels)
        a_node = max(0.0, found.seconds - found.without) / max(1, total)
        for sequence, count, row in zip(ours, found.nodes, gains, strict=True):
            assert sequence.record
            saved, spent = row[:count].sum() / (self._worth * plain), count * a_node + one_draft
            sequence.record.pays += SMOOTH * (min(saved / max(spent, 1e-9), 4.0) - sequence.record.pays)
