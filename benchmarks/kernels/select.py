"""tree_select and tree_learn against the same on the host, with the copies that takes, and what they add to a round."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ddtree.kernels import (
    AcceptanceTable,
    AcceptedPath,
    DraftTree,
    Prices,
    reference,
    select_nodes,
    tree_learn,
    tree_select,
)

from .data import Candidates, full
from .measure import Contender
from .peers import Peers
from .report import Report

SECTION, LEARN = "tree_select", "tree_learn"
BUDGET = 63
SETS = 4
BATCHES = (1, 8, 32, 64, 256)
LIMIT_US = {64: 40, 256: 100}
EDGES = torch.log(torch.tensor([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96]))


def run(report: Report, _: Peers) -> None:
    for batch in BATCHES[:1] if report.quick else BATCHES:
        calls = [_Call(batch, seed) for seed in range(SETS)]
        contenders = [
            Contender("ddtree", calls, calls[-1].check),
            Contender("numpy, with copies", [c.host for c in calls], host=True),
        ]
        us = report.compare(SECTION, {"budget": BUDGET, "batch": batch}, contenders)
        if batch in LIMIT_US:
            report.bar(
                f"{SECTION}, budget {BUDGET}, batch {batch}", us.get("ddtree"), at_most=LIMIT_US[batch], unit=" µs"
            )
        report.compare(LEARN, {"budget": BUDGET, "batch": batch}, [Contender("ddtree", [c.learn for c in calls])])


class _Call:
    def __init__(self, batch: int, seed: int) -> None:
        self._whole = Candidates.random(batch, seed).tree(BUDGET)
        self._table = AcceptanceTable.empty(2, 8, EDGES.cuda())
        self._prices = _prices(batch, 1e-9)  # all nodes compete and stay, so every call finds the same trees
        self._tree = _copy(self._whole)
        self._found = tree_select(self._tree, self._table, self._prices)
        path = torch.zeros(batch, self._tree.max_depth + 1, dtype=torch.int32, device="cuda")
        self._accepted = AcceptedPath(path, full(batch, 1), full(batch, 0))

    def __call__(self) -> Tensor:
        return tree_select(self._tree, self._table, self._prices).nodes

    def host(self) -> Tensor:
        return reference.tree_select(self._tree, self._table, self._prices).nodes

    def learn(self) -> None:
        tree_learn(self._table, self._tree, self._found, self._accepted)

    def check(self) -> None:
        tree, prices = _copy(self._whole), _prices(len(self._whole.tokens), 0.1)
        found = tree_select(tree, self._table, prices)
        gains, has = found.gains.cpu().numpy(), self._whole.n_nodes.cpu().numpy() - 1
        nodes, expected = select_nodes(gains, has, prices)
        assert found.nodes.tolist() == nodes.tolist(), "not the nodes of the definition"
        assert found.expected.tolist() == expected.tolist()
        assert tree.n_nodes.tolist() == (nodes + 1).tolist()


def _prices(batch: int, node: float) -> Prices:
    """Where a node costs so many tokens, and a hundredth more for its context."""
    at = np.unique(np.concatenate([[0, 1], 2 ** np.arange(1, 15)]))
    return Prices(
        kind=full(batch, 0),
        luck=torch.ones(batch, device="cuda"),
        most=full(batch, BUDGET),
        price=torch.full((batch,), node / 100, dtype=torch.float64, device="cuda"),
        at=torch.from_numpy(at.astype(np.int32)).cuda(),
        cost=torch.from_numpy(node * at).cuda(),
    )


def _copy(tree: DraftTree) -> DraftTree:
    return replace(tree, **{name: x.clone() for name, x in vars(tree).items() if isinstance(x, Tensor)})
