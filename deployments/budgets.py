"""How many nodes each tree of a round gets, and whether drafting pays at all: where tokens per second are highest by what nodes
are worth (tree_select) and rounds cost (costs.py). For requests whose budget is `auto`. Pure policy: knows no peers.

Nodes of all trees compete: the next one taken is that with the highest chance of being accepted, less what its context costs,
and as many are taken as give the most expected tokens per second, looked for over the whole curve. A batch for which that is no
more than plain decoding gives goes on without drafts, and so does a sequence whose own drafts are not worth theirs. A context
that was given up is computed again when drafting seems to pay, which may take a small part of the time only.

They can be chosen after the draft, by what that draft says, or before it, by what drafts said of late. The latter gives fewer
tokens a round, but the batch can be laid out while drafters work; which of them pays is found by timing rounds of both. A round
may take three milliseconds: one whose nodes were chosen before it takes nothing else of what is here, but in a small part of the
time, which is there for learning from rounds and for looking ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ddtree.deployments.costs import Costs, StepSize
from ddtree.deployments.pace import Pace
from ddtree.deployments.round_curve import RoundCurve, kind_of
from ddtree.deployments.scheduler import Entry
from ddtree.deployments.sequence import Record, Sequence
from ddtree.kernels import (
    AcceptanceTable,
    AcceptedPath,
    DraftTree,
    Prices,
    Selection,
    select_nodes,
    tree_learn,
    tree_select,
)
from ddtree.verifier.transfer import to_device

EDGES = np.log([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96])  # where what the drafter says is cut
DEPTHS = 8  # told apart; deeper ones count as the last
LEVELS = (2, 4, 8)  # depths that a draft may have beside all; fewer of them cost less
WHOLE = 32  # rounds between two whose drafts have all depths, to see what is missed
OTHER = 64  # rounds between two whose nodes are chosen when they usually are not, to see what that takes
SAMPLES = 64  # drafts that stand for those to come
SAMPLED = 4  # of a round's drafts, about, become samples
SMOOTH = 0.1  # weight of a round in what is averaged over rounds, and of a look over looks
BACK = 1.05  # so much better than plain decoding drafts must promise to be before they are made again
TRIES = 4  # different drafts, for a forecast without one; the same ones for all ways
LOOK = 16  # rounds between two looks at what drafts would give, unless there are half or twice as many sequences
AT_ONCE = 8  # trees that a round without drafts looks at, but always a whole way to draft
UNLUCKY = 0.5  # times the forecast
REST = 64  # rounds that a sequence goes on without drafts when its own did not pay; twice as many each further time
OFF_ROUNDS = 400  # rounds without drafts, until some are made whatever they promise: their cost may have changed
REBUILDING = 0.01  # part of the time that may be spent on contexts that were given up
SAVED_S = 2.0  # of that time, what is kept for later
THINKING = 0.02  # part of the time that may be spent on what a round can do without
THOUGHTS_S = 1.0  # of that time, what is kept for later
ROOM = 4  # trees are built with so many times the nodes that they got of late: a draft may be good
LEAST = 8  # and so many more
FADE = 0.95  # by round, of what a sequence's record counts


@dataclass(frozen=True)
class Choice:
    """The nodes of a round's trees, while they are chosen and after. Made by `Budgets.begin`."""

    sequences: list[Sequence]  # by tree
    ours: list[int]  # the trees that adapt and are drafted for
    entries: int  # of the round, prompts among them
    curve: RoundCurve
    prices: Prices


@dataclass(frozen=True)
class Chosen:
    """What a round's trees got. Written by `Budgets.choose`."""

    choice: Choice
    tree: DraftTree
    selection: Selection
    nodes: list[int]  # by tree
    expected: list[float]  # draft tokens accepted, by tree


@dataclass(frozen=True)
class _Sample:
    """A tree that was drafted to the full depth."""

    gains: NDArray[np.float32]  # [N]
    depths: NDArray[np.int32]  # [N]

    def within(self, levels: int) -> NDArray[np.float32]:
        """Gains of the nodes of the first depths, and 0 for the others, which come last."""
        kept = self.gains[self.depths <= levels]
        return np.pad(kept, (0, len(self.gains) - len(kept)))


@dataclass
class _Look:
    """What the ways to draft promise: all of them for the same sequences and by the same drafts, although it takes rounds."""

    begun: int  # in which round
    sequences: list[Sequence]  # then, although some may be done by now
    luck: NDArray[np.float32]  # of each
    samples: dict[bool, list[_Sample]]
    promises: list[float] = field(default_factory=list)  # by way, as far as it is


class Promised:
    """Promises by way, averaged over looks: one of a single sequence sees four drafts, and drafts differ more than ways do."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.mean, self._looks = np.zeros(1), 0

    def take(self, promises: list[float]) -> None:
        self._looks += 1
        self.mean = self.mean + max(SMOOTH, 1 / self._looks) * (np.array(promises) - self.mean)


class Budgets:
    """`prepare`, then for a round with drafts `begin`, `choose` and `note`; `think` while the verifier computes."""

    def __init__(
        self, costs: Costs, most: int, horizon: int, device: torch.device | str = "cpu", thinking: float = THINKING
    ) -> None:
        """`most` nodes a tree may have, none of them deeper than `horizon`. `device`: where trees are. `thinking`: part of the
        time that may be spent on what a round can do without."""
        self.costs, self.most, self._horizon, self._device = costs, most, horizon, torch.device(device)
        options = sorted({horizon, *(levels for levels in LEVELS if levels < horizon)})
        self._ways = list(product(options, (True, False)))  # depths, and whether nodes are chosen after the draft
        self._levels = self._asked = horizon  # depths of drafts from now on, and of this round's
        self._prefers_after = self.after = True  # whether nodes are chosen after drafts; from now on, and this round's
        self._table = AcceptanceTable.empty(2, DEPTHS, torch.from_numpy(EDGES.astype(np.float32)).to(self._device))
        self._samples: dict[bool, deque[_Sample]] = {kind: deque(maxlen=SAMPLES) for kind in (False, True)}
        self._concerned = False  # whether any budget of this round adapts
        self._drafts = True  # whether anybody is drafted for
        self._looked = _Look(0, [], np.empty(0, np.float32), {})  # last, or is under way
        self._promised = Promised()  # for about so many sequences
        self._promising = False  # whether they seem to pay for those that are not drafted for
        self._rounds, self._until = 0, 0  # rounds so far, and when drafts are tried again at the latest
        self._worth = BACK  # times the tokens per second of plain decoding that drafts give, prompts left out, averaged
        self._nodes = float(most)  # of a tree, averaged
        self._rebuilding = Pace(REBUILDING, SAVED_S)  # of contexts that were given up
        self._thinking = Pace(thinking, THOUGHTS_S)
        self.notes = True  # whether this round's trees are looked at: `begin`, `choose` and `note`
        self._noted = 0  # rounds in which they were
        self._planned_for = 0  # sequences

    def prepare(self, sequences: list[Sequence], rebuild_rows: int) -> list[Sequence]:
        """Before a round is planned: how many nodes each sequence's tree may have, and who is to have a drafter. Returns those
        that give theirs up. A sequence that is to have one again computes so many rows for it."""
        ours = [s for s in sequences if s.request.adapts and not s.flying]
        self._concerned = bool(ours)
        if not ours:
            self._asked = self._horizon
            return []
        self._rounds += 1
        if self._drafts and self._worth < 1:
            self._end_drafts()
        self.after = self._prefers_after != (self._rounds % OTHER == 0)
        self.notes = self.after or self._thinking.ready or not self.costs.step.known
        self._noted += self.notes
        others = any(s.wants_drafter for s in sequences if not s.request.adapts)  # who get all depths
        whole = others or (self.notes and self._noted % WHOLE == 0)
        self._asked = self._horizon if whole else self._levels
        given_up = []
        for sequence in ours:
            if sequence.record is None:
                sequence.record, sequence.wants_drafter = Record(), self._drafts
            elif sequence.wants_drafter and not (self._drafts and sequence.record.pays >= 1):
                self._rest(sequence)
                given_up.append(sequence)
            elif not sequence.wants_drafter:
                sequence.record.rest -= 1
                if self._promising and sequence.record.rest < 0 and self._affords(rebuild_rows):
                    sequence.record, sequence.wants_drafter = Record(failures=sequence.record.failures), True
            sequence.nodes = self._nodes_of(sequence) if sequence.wants_drafter else 0
            sequence.levels = self._asked
        self._promising = False
        if self._drafts and not any(s.wants_drafter for s in ours):
            self._end_drafts()
        return given_up

    @property
    def grown(self) -> int:
        """Nodes that trees are built with, of which some are kept."""
        return min(self.most, LEAST + int(ROOM * self._nodes))

    def begin(self, entries: list[Entry], budgets: list[int]) -> Choice:
        """While drafters work. The first entries have trees, of so many nodes at most; a sequence that does not adapt keeps them
        all, and so do the others as long as no step was timed, and in a round whose nodes were chosen before."""
        with self._spending():
            sequences = [entry.sequence for entry in entries[: len(budgets)]]
            ours = [i for i, s in enumerate(sequences) if s.request.adapts and budgets[i]]
            curve = RoundCurve(self.costs, entries, budgets, ours, self._asked, self.after)
            chooses = self.after and self.costs.step.known
            prices = self._prices(sequences, budgets, ours if chooses else [], curve, self._worth * curve.plain)
            return Choice(sequences, ours, len(entries), curve, prices)

    def choose(self, choice: Choice, tree: DraftTree) -> Chosen:
        """How many of its tree's nodes each sequence gets; the others are cut off."""
        with self._spending():
            found = tree_select(tree, self._table, choice.prices)
            return Chosen(choice, tree, found, found.nodes.tolist(), found.expected.tolist())

    def note(self, chosen: Chosen, paths: list[list[int]]) -> None:
        """These paths of the trees were accepted. May come as late as in the next round's thinking."""
        if any(chosen.nodes):
            tree_learn(self._table, chosen.tree, chosen.selection, _accepted(paths, chosen.tree))
        for sequence, expected, path in zip(chosen.choice.sequences, chosen.expected, paths, strict=True):
            if record := sequence.record:
                record.expected = FADE * record.expected + expected
                record.accepted = FADE * record.accepted + len(path) - 1

    def spent(self, size: StepSize, stages: dict[str, float], whole: float, drafted: int) -> None:
        """A round took `whole` seconds; so many of its sequences were drafted for. Nothing is learned from one in which no budget
        adapts: it should not pay for what it does not use."""
        if not self._concerned:
            return
        self._rebuilding.passed(whole)
        self._thinking.passed(whole)
        if self._thinking.ready:
            with self._thinking.timed():
                self.costs.observe(size, stages, whole, drafted, self._asked, kind_of(drafted, self.after))

    def think(self, sequences: list[Sequence], chosen: Chosen | None) -> None:
        """While the verifier computes: what was chosen says something of drafting, and so do the last drafts together."""
        if not self._concerned:
            return
        if chosen and chosen.choice.ours and self.costs.step.known:
            with self._spending():
                self._keep_samples(chosen)
                self._learn(chosen)
        ours = [s for s in sequences if s.request.adapts and s.record and s.decoding]
        if ours and (self._thinking.ready or _other(len(self._looked.sequences), len(ours))):
            with self._thinking.timed():
                self._look(ours)
        drafting = [s for s in ours if s.wants_drafter]
        soon = not self._prefers_after or (self._rounds + 1) % OTHER == 0
        if drafting and soon and (self._thinking.ready or _other(self._planned_for, len(drafting))):
            self._planned_for = len(drafting)
            with self._thinking.timed():
                self._plan(drafting)

    def _spending(self) -> AbstractContextManager[None]:
        """What a round whose nodes were chosen before can do without."""
        return nullcontext() if self.after else self._thinking.timed()

    def _look(self, ours: list[Sequence]) -> None:
        """Whether, how deep and in which order to draft for these: some ways a round, then what follows from all."""
        look = self._looked
        if others := _other(len(look.sequences), len(ours)):
            self._promised.forget()
        if self._rounds >= look.begun + LOOK or others:
            samples = {kind: list(samples) for kind, samples in self._samples.items() if samples}
            self._looked = look = _Look(self._rounds, ours, _luck_of(ours), samples)
        left = self._ways[len(look.promises) :]
        if not left or not look.sequences:
            return
        now = left[: 1 if self._drafts else max(1, AT_ONCE // len(look.sequences))]
        look.promises += [self._promise(look, *way) for way in now]
        if len(now) < len(left):
            return
        if (best := max(look.promises)) == inf:  # nothing is known
            self._levels, self._prefers_after = self._horizon, True
        else:
            self._promised.take(look.promises)
            best = float(self._promised.mean.max())
            self._levels, self._prefers_after = self._ways[int(self._promised.mean.argmax())]
        if not self._prefers_after and best < 1:  # then trees of no nodes say nothing of it
            self._worth += SMOOTH * (best - self._worth)
        self._promising = best > BACK
        if not self._drafts and (self._promising or self._rounds >= self._until):
            self._drafts, self._worth, self._promising = True, BACK, True

    def _affords(self, rows: int) -> bool:
        """Takes what so many rows cost from the time for rebuilding, if there is as much."""
        return self._rebuilding.affords(float(self.costs.step.rows(rows)))

    def _end_drafts(self) -> None:
        self._drafts, self._until = False, self._rounds + OFF_ROUNDS

    def _rest(self, sequence: Sequence) -> None:
        record = sequence.record
        assert record
        sequence.wants_drafter = False
        if record.luck < UNLUCKY:  # its own drafts are to blame, not the load
            record.rest = REST << min(record.failures, 6)
            record.failures += 1

    def _nodes_of(self, sequence: Sequence) -> int:
        assert sequence.record
        planned = sequence.record.planned
        return self.grown if self.after else round(self._nodes) if planned is None else planned

    def _prices(
        self, sequences: list[Sequence], most: list[int], ours: list[int], curve: RoundCurve, rate: float
    ) -> Prices:
        """Of trees of so many nodes, where a second is worth `rate` tokens. Those that are not ours keep them."""
        price = np.full(len(sequences), -1.0)
        price[ours] = rate * curve.prices if ours else 0
        knots = curve.knots(sum(most[i] for i in ours)) if ours else np.zeros(1)
        values = {
            "kind": np.array([not s.request.sampling.greedy for s in sequences], np.int32),
            "luck": _luck_of(sequences),
            "most": np.array(most, np.int32),
            "price": price,
            "at": knots.astype(np.int32),
            "cost": rate * curve(knots),
        }
        pinned = self._device.type == "cuda"
        tensors = {name: torch.from_numpy(value) for name, value in values.items()}
        return Prices(**{name: x.pin_memory() if pinned else x for name, x in tensors.items()})

    def _plan(self, sequences: list[Sequence]) -> None:
        """The nodes of their next trees, for when there is no draft yet."""
        if not self._known(sequences, self._samples):
            return
        means = {kind: self._mean(samples, self._levels) for kind, samples in self._samples.items() if samples}
        gains = np.stack([means[not s.request.sampling.greedy] for s in sequences])
        curve = self._curve(sequences, self._levels, after=False)
        nodes = self._select(gains, _luck_of(sequences), sequences, curve, self._worth * curve.plain)
        for sequence, count in zip(sequences, nodes.tolist(), strict=True):
            assert sequence.record
            sequence.record.planned = count
            if not count:
                sequence.record.pays *= 1 - SMOOTH

    def _known(self, sequences: list[Sequence], samples: Mapping[bool, Any]) -> bool:
        return self.costs.step.known and all(samples.get(not s.request.sampling.greedy) for s in sequences)

    def _mean(self, samples: Iterable[_Sample], levels: int) -> NDArray[np.float32]:
        """Gains of such a draft, node by node [most], on average."""
        rows = [sample.within(levels) for sample in samples]
        mean: NDArray[np.float32] = np.mean([np.pad(row, (0, self.most - len(row))) for row in rows], 0)
        return mean

    def _promise(self, look: _Look, levels: int, after: bool) -> float:
        """Times the tokens per second of plain decoding that drafts with so many depths would give."""
        sequences, luck = look.sequences, look.luck
        if not self._known(sequences, look.samples):
            return inf
        curve = self._curve(sequences, levels, after)
        kinds = [not s.request.sampling.greedy for s in sequences]
        if not after:
            means = {kind: self._mean(look.samples[kind], levels) for kind in set(kinds)}
            nodes = self._select(np.stack([means[kind] for kind in kinds]), luck, sequences, curve, curve.plain)
        ratios = []
        for turn in range(TRIES):
            gains = np.zeros((len(sequences), self.most), np.float32)
            for i, kind in enumerate(kinds):
                samples = look.samples[kind]
                row = samples[(i + turn * len(samples) // TRIES) % len(samples)].within(levels)
                gains[i, : len(row)] = row
            if after:
                nodes = self._select(gains, luck, sequences, curve, curve.plain)
            chances = np.minimum(gains * luck[:, None], 1)[np.arange(self.most) < nodes[:, None]]
            ratios.append(float((curve.sure + chances.sum()) / curve.seconds(nodes) / curve.plain))
        return sum(ratios) / len(ratios)

    def _curve(self, sequences: list[Sequence], levels: int, after: bool) -> RoundCurve:
        """Of a round that all of these are drafted for, and no others."""
        entries = [Entry(s, 1, 0, True) for s in sequences]
        return RoundCurve(self.costs, entries, [0] * len(entries), list(range(len(entries))), levels, after)

    def _select(
        self,
        gains: NDArray[np.float32],
        luck: NDArray[np.float32],
        sequences: list[Sequence],
        curve: RoundCurve,
        rate: float,
    ) -> NDArray[np.int32]:
        most = [gains.shape[1]] * len(gains)
        prices = self._prices(sequences, most, list(range(len(gains))), curve, rate)
        return select_nodes(gains, most, replace(prices, luck=torch.from_numpy(luck)))[0]

    def _keep_samples(self, chosen: Chosen) -> None:
        """Of drafts to the full depth, some."""
        ours = chosen.choice.ours
        often = self._levels < self._horizon or self._rounds % max(1, len(ours) // SAMPLED) == 0
        if self._asked < self._horizon or not often:
            return
        gains, depths = chosen.selection.gains.cpu().numpy(), chosen.tree.depth[:, 1:].cpu().numpy()
        for i in ours:
            kind = not chosen.choice.sequences[i].request.sampling.greedy
            self._samples[kind].append(_Sample(gains[i].copy(), depths[i].copy()))

    def _learn(self, chosen: Chosen) -> None:
        """What the choice says of drafting for this batch, and for each of its sequences."""
        choice = chosen.choice
        curve, ours = choice.curve, choice.ours
        nodes, expected = np.array(chosen.nodes)[ours], np.array(chosen.expected)[ours]
        seconds, total = curve.seconds(nodes), int(nodes.sum())
        if choice.entries == len(choice.sequences):  # no prompts beside the trees
            self._worth += SMOOTH * ((curve.sure + expected.sum()) / seconds / curve.plain - self._worth)
        self._nodes += SMOOTH * (total / len(ours) - self._nodes)
        a_node = max(0.0, seconds - float(curve(np.zeros(1))[0])) / max(1, total)
        for i, count, tokens in zip(ours, nodes, expected, strict=True):
            record = choice.sequences[i].record
            assert record
            saved, spent = tokens / (self._worth * curve.plain), count * a_node + curve.one_draft
            record.pays += SMOOTH * (min(saved / max(spent, 1e-9), 4.0) - record.pays)


def _other(before: int, now: int) -> bool:
    """Whether there are half or twice as many sequences as before, when there were any."""
    return before > 0 and not before <= 2 * now <= 4 * before


def _accepted(paths: list[list[int]], tree: DraftTree) -> AcceptedPath:
    """Where the trees are. What they drew last is not said: nobody learns from it."""
    nodes = torch.tensor([path + [-1] * (tree.max_depth + 1 - len(path)) for path in paths], dtype=torch.int32)
    lengths = torch.tensor([len(path) for path in paths], dtype=torch.int32)
    return to_device(AcceptedPath(nodes, lengths, lengths), tree.tokens.device)


def _luck_of(sequences: list[Sequence]) -> NDArray[np.float32]:
    return np.array([s.record.luck if s.record else 1 for s in sequences], np.float32)
