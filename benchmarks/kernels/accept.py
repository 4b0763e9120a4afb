"""tree_accept against sglang's verify_tree_greedy, which does the same walk."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ddtree.kernels import DraftTree, reference, tree_accept

from .data import Candidates, answers
from .measure import Contender
from .peers import Peers, SglangTrees
from .report import Report

SECTION = "tree_accept"
SETS = 4
CASES = ((63, 1), (63, 32), (63, 64), (1023, 1), (1023, 32))
LIMIT_US = 4


def run(report: Report, peers: Peers) -> None:
    for budget, batch in CASES[:2] if report.quick else CASES:
        trees = [Candidates.random(batch, seed).tree(budget) for seed in range(SETS)]
        inputs = [(answers(tree), tree) for tree in trees]
        contenders = [
            Contender("ddtree", [partial(tree_accept, y, tree) for y, tree in inputs], partial(_check, *inputs[-1]))
        ]
        if peers.common:
            made = [SglangTrees(tree, y) for y, tree in inputs]
            check = partial(_check_sglang, made[-1], inputs[-1][0])
            contenders.append(Contender("sglang verify_tree_greedy", [m.accept for m in made], check))
        us = report.compare(SECTION, {"budget": budget, "batch": batch}, contenders)
        ours, theirs = us.get("ddtree"), us.get("sglang verify_tree_greedy")
        case = f"tree_accept, budget {budget}, batch {batch}"
        report.bar(case, ours, at_most=LIMIT_US, unit=" µs")
        if theirs:
            report.bar(f"{case}, over sglang", theirs / ours if ours else None, at_least=1, unit="×")


def _check(y: Tensor, tree: DraftTree) -> None:
    got, wanted = tree_accept(y, tree), reference.tree_accept(y, tree)
    for name in ("path", "n_accepted", "bonus"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), f"{name} differs from the reference's"


def _check_sglang(made: SglangTrees, y: Tensor) -> None:
    made.accept()
    wanted = reference.tree_accept(y.cpu(), made.tree)
    assert torch.equal(made.node_path().cpu(), wanted.path), "path differs from the reference's"
