"""What a round takes by how many nodes its trees get, and what plain decoding would do meanwhile. Knows costs and sequences, not
how nodes are chosen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddtree.deployments.costs import Costs, Numbers, StepSize
from ddtree.deployments.scheduler import Entry


def size_of(entries: Iterable[Entry], budgets: Iterable[int]) -> StepSize:
    """Of a step of these entries, the first of which have trees of so many nodes besides the root."""
    nodes = list(budgets)
    sized = [
        (1 + nodes[i] if i < len(nodes) else entry.rows, entry.sequence.computed) for i, entry in enumerate(entries)
    ]
    rows, read = sum(rows for rows, _ in sized), sum(seen for _, seen in sized)
    return StepSize(rows, len(sized), sum(n > 0 for n in nodes), read, sum(rows * seen for rows, seen in sized))


class RoundCurve:
    """Seconds of a round by the nodes of the trees that are to be chosen, and what plain decoding would do."""

    def __init__(self, costs: Costs, entries: list[Entry], nodes: list[int], ours: list[int], levels: int, after: bool):
        """`entries`: those with trees first; `nodes` of these trees, whatever they are of `ours`; `levels` of the drafts;
        `after`: whether nodes are chosen after the draft."""
        chosen = set(ours)
        nodes = [0 if i in chosen else n for i, n in enumerate(nodes)]
        trees, drafted = entries[: len(nodes)], len(ours) + sum(n > 0 for n in nodes)
        size, alone = size_of(entries, nodes), size_of(trees, nodes)
        self._costs, self._rows, self._trees = costs, size.rows, len(ours)
        self._fixed = costs.step.beside(size) + costs.rest(kind_of(drafted, after), len(entries))
        self._fixed += costs.draft(drafted, levels)
        undrafted = costs.draft(drafted - len(ours), levels) + costs.rest(
            kind_of(drafted - len(ours), after), len(trees)
        )
        others = sum(trees[i].sequence.accepts for i, n in enumerate(nodes) if n)  # draft tokens of theirs
        self.sure = sum(entry.finishes for entry in entries) + others  # tokens of the step without these nodes
        seconds = float(costs.step.rows(alone.rows)) + costs.step.beside(alone) + undrafted
        self.plain = (len(trees) + others) / seconds if seconds else 0.0  # tokens per second
        self.one_draft = costs.draft(drafted, levels) - costs.draft(drafted - 1, levels)
        computed = [trees[i].sequence.computed for i in ours]
        self.prices = costs.step.per_attended * np.array(computed, np.float64)  # seconds of a node, by tree

    def __call__(self, nodes: NDArray[Any]) -> Numbers:
        """Without what nodes cost by tree."""
        found: Numbers = self._fixed + self._costs.step.rows(self._rows + nodes)
        return found + self._costs.step.per_tree * self._trees * (np.asarray(nodes) > 0)

    def knots(self, most: int) -> NDArray[Any]:
        """Where it bends, up to so many nodes."""
        bends = self._costs.step.rows.bends - self._rows
        return np.unique(np.concatenate([[0, 1, max(most, 1)], bends[(bends > 1) & (bends < most)]]))

    def seconds(self, nodes: NDArray[Any]) -> float:
        """Of the round, with so many nodes by tree."""
        return float(self(np.asarray(nodes.sum()))) + float(self.prices @ nodes)


def kind_of(drafted: int, after: bool) -> str:
    """Of a round, for what it takes beside drafting and verifying."""
    return "plain" if not drafted else "after" if after else "before"
