"""tree_build against the Python heap that engines run on the host, and against sglang's construction of mask and links."""

from __future__ import annotations

from dataclasses import fields
from functools import partial

import torch
from torch import Tensor

from ddtree.kernels import DraftTree, tree_build

from . import python_heap
from .data import LEVELS, WIDTH, Candidates, answers, full
from .measure import Contender
from .peers import Peers, SglangTrees
from .report import Report

SECTION = "tree_build"
SETS = 8
LIMITS_US = {(16, 1): 8, (63, 1): 8, (16, 32): 15, (63, 32): 15, (255, 1): 20, (1023, 1): 45}
QUICK = ((63, 1), (63, 32))


def run(report: Report, peers: Peers) -> None:
    for budget, batch in QUICK if report.quick else (*LIMITS_US, (255, 32), (1023, 32)):
        _case(report, peers, budget, batch)
    report.remarks.append(
        f"tree_build: {LEVELS} depths of {WIDTH} candidates. The Python heap is timed from an idle device to an idle device: "
        "candidates to the host, heap, mask, everything back. sglang's build_tree_kernel_efficient does not choose nodes: it is "
        "given them and writes mask (of the tree's own rows, one byte per pair), positions and links; the fills that it needs "
        "before each call are not counted."
    )


def _case(report: Report, peers: Peers, budget: int, batch: int) -> None:
    inputs = [Candidates.random(batch, seed) for seed in range(SETS)]
    wanted = full(batch, budget)
    contenders = [
        Contender("ddtree", [partial(_build, c, wanted, budget) for c in inputs], partial(_check, inputs, budget)),
        Contender(
            "Python heap",
            [partial(python_heap.build, c, budget) for c in inputs],
            partial(_check_heap, inputs[0], budget),
            host=True,
        ),
    ]
    if peers.common:
        trees = [c.tree(budget) for c in inputs[:2]]
        made = [SglangTrees(tree, answers(tree)) for tree in trees]
        check = partial(_check_sglang, made[0])
        contenders.append(Contender("sglang links only", [m.build for m in made], check))
    us = report.compare(SECTION, {"budget": budget, "batch": batch}, contenders)
    ours, case = us.get("ddtree"), f"tree_build, budget {budget}, batch {batch}"
    if (budget, batch) in LIMITS_US:
        report.bar(case, ours, at_most=LIMITS_US[budget, batch], unit=" µs")
    ratio = us["Python heap"] / ours if ours else None
    report.bar(f"{case}, over the Python heap", ratio, at_least=50, unit="×")


def _build(c: Candidates, wanted: Tensor, budget: int) -> DraftTree:
    return tree_build(c.logprobs, c.ids, c.root, c.seq_len, wanted, max_budget=budget)


def _check(inputs: list[Candidates], budget: int) -> None:
    for c in inputs[:2]:
        tree, expected = _build(c, full(len(c.root), budget), budget), c.tree(budget)
        for f in fields(expected):
            a, b = getattr(tree, f.name), getattr(expected, f.name)
            assert a == b if isinstance(b, int) else torch.equal(a, b), f"{f.name} differs from the reference's"


def _check_heap(c: Candidates, budget: int) -> None:
    """Its sums are float64 and go over siblings, so scores that nearly tie may come in another order."""
    tokens, wanted = python_heap.build(c, budget).tokens.int(), c.tree(budget).tokens
    same = float(torch.isin(tokens, wanted).float().mean())
    assert same > 0.9, f"{same:.2f} of the tokens are the reference's"


def _check_sglang(made: SglangTrees) -> None:
    assert torch.equal(made.child, made.tree.first_child.long()), "links differ"
    assert torch.equal(made.sibling, made.tree.next_sibling.long()), "links differ"
    assert torch.equal(made.positions.view(made.batch, -1), made.tree.position.long()), "positions differ"
