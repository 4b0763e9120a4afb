"""tree_select and tree_learn against their definitions node by node, and against every other choice there is."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree.kernels import AcceptedPath, DraftTree, tree_build, tree_learn, tree_select
from ddtree.kernels.selection import MEMORY, PRIOR, UNIT, AcceptanceTable, Prices, Selection

from .devices import DEVICES, on_devices, poisoned_memory
from .strategies import candidates, kinds, seeds, token_ids

EDGES = np.log([0.02, 0.1, 0.3, 0.7, 0.95]).astype(np.float32)
DEPTHS = 4


@dataclass(frozen=True)
class Call:
    """On the CPU."""

    logprobs: Tensor
    ids: Tensor
    table: AcceptanceTable
    prices: Prices
    size: int  # N

    def tree(self, nodes: list[int] | None = None) -> DraftTree:
        batch = len(self.ids)
        numbers = torch.arange(batch, dtype=torch.int32)
        budget = torch.full((batch,), self.size, dtype=torch.int32) if nodes is None else torch.tensor(nodes).int()
        return tree_build(self.logprobs, self.ids, numbers, 7 + numbers, budget, max_budget=self.size)

    def run(self, device: str) -> tuple[DraftTree, Selection]:
        """The tree afterwards, and what was found, on the CPU again."""
        tree, table, prices = (moved(x, device) for x in (self.tree(), self.table, self.prices))
        with poisoned_memory():
            found = tree_select(tree, table, prices)
        return moved(tree, "cpu"), moved(found, "cpu")


def moved(value, device: str):
    fields = {name: x.to(device, copy=True) for name, x in vars(value).items() if isinstance(x, Tensor)}
    return replace(value, **fields)


def random_call(rng: np.random.Generator, batch: int, levels: int, width: int, size: int, kind: str) -> Call:
    logprobs = np.stack([candidates(rng, levels, width, kind) for _ in range(batch)])
    ids = np.stack([token_ids(rng, levels, width) for _ in range(batch)])
    shape = (2, 1 + DEPTHS, 2, len(EDGES) + 1)
    cases = rng.integers(0, 3000, shape) * (rng.random(shape) < 0.7)
    hits = np.floor(cases * rng.random(shape))
    table = AcceptanceTable(*(torch.from_numpy(x.astype(np.float32)) for x in (cases, hits, EDGES)))
    at = np.unique(np.concatenate([[0], rng.integers(0, batch * size + 2, rng.integers(0, 6))]))
    prices = Prices(
        torch.from_numpy(rng.integers(0, 2, batch).astype(np.int32)),
        torch.from_numpy(rng.choice([0.3, 1, 1, 1.7], batch).astype(np.float32)),
        torch.from_numpy(rng.choice([size, size, 3], batch).astype(np.int32)),
        torch.from_numpy(rng.choice([-1, 0, 0, 1e-3, 0.05, 9], batch)),
        torch.from_numpy(at.astype(np.int32)),
        torch.from_numpy(rng.normal(size=len(at)).cumsum() + at * rng.choice([-0.01, 0.02, 0.3])),
    )
    return Call(torch.from_numpy(logprobs), torch.from_numpy(ids), table, prices, size)


def expected_gains(call: Call, tree: DraftTree, b: int) -> list[tuple[float, int]]:
    """Chance and cell of each node of a tree but its root."""
    cases, hits = (x.double().numpy() for x in (call.table.cases, call.table.hits))
    kind = int(call.prices.kind[b])
    found: list[tuple[float, int, bool]] = [(1.0, -1, True)]
    for node in range(1, int(tree.n_nodes[b])):
        depth, parent = int(tree.depth[b, node]), int(tree.parent[b, node])
        said = float(tree.score[b, node] - tree.score[b, parent])
        gain, _, before = found[parent]
        bin_ = sum(edge < said for edge in EDGES.tolist())
        known = math.exp(said)
        for level in (0, min(depth, DEPTHS)):
            at = kind, level, int(before), bin_
            known = (hits[at] + PRIOR * known) / (cases[at] + PRIOR)
        found.append(
            (
                gain * known,
                int(np.ravel_multi_index(at, cases.shape)),
                before and int(tree.first_child[b, parent]) == node,
            )
        )
    return [(gain, cell) for gain, cell, _ in found[1:]]


def units(tokens: float) -> int:
    return round(Fraction(tokens) / Fraction(UNIT))  # to the even one where two are as near


def cost(prices: Prices, nodes: int) -> int:
    at, known = prices.at.tolist(), [units(x) for x in prices.cost.tolist()]
    if len(at) == 1:
        return known[0]
    i = max(i for i in range(len(at) - 1) if at[i] <= nodes)
    return known[i] + (known[i + 1] - known[i]) * (nodes - at[i]) // (at[i + 1] - at[i])


def expected_choice(gains: Tensor, room: list[int], prices: Prices) -> tuple[list[int], list[int]]:
    """Nodes by tree, and what is expected of them in units."""
    value, wishes = [], []
    for b, (row, luck, price) in enumerate(zip(gains, prices.luck, prices.price.tolist(), strict=True)):
        value.append([units(x) for x in (row * luck).clamp(max=1).tolist()[: room[b]]])
        if price >= 0:
            least = itertools.accumulate(value[b], min)
            wishes += [(units(price) - x, b, node) for node, x in enumerate(least)]
    nets, net = [-cost(prices, 0)], 0
    for n, (_, b, node) in enumerate(sorted(wishes), 1):
        net += value[b][node] - units(prices.price[b].item())
        nets.append(net - cost(prices, n))
    taken = [b for _, b, _ in sorted(wishes)[: nets.index(max(nets))]]
    nodes = [taken.count(b) if price >= 0 else room[b] for b, price in enumerate(prices.price.tolist())]
    return nodes, [sum(value[b][:n]) for b, n in enumerate(nodes)]


def check(call: Call, device: str) -> None:
    whole = call.tree()
    tree, found = call.run(device)
    has = (whole.n_nodes - 1).tolist()
    for b, n in enumerate(has):
        wanted = expected_gains(call, whole, b)
        assert found.cells[b].tolist() == [cell for _, cell in wanted] + [-1] * (call.size - n)
        np.testing.assert_allclose(found.gains[b, :n], [gain for gain, _ in wanted], rtol=2e-5)
        assert not found.gains[b, n:].any()
    room = torch.minimum(whole.n_nodes - 1, call.prices.most).tolist()
    nodes, expected = expected_choice(found.gains, room, call.prices)
    assert found.nodes.tolist() == nodes
    assert found.expected.tolist() == [np.float32(x * UNIT) for x in expected]
    smaller = call.tree(nodes)
    assert torch.equal(tree.n_nodes, smaller.n_nodes)
    for name in ("tokens", "parent", "depth", "position", "first_child", "next_sibling", "ancestors", "score"):
        for b, n in enumerate(nodes):
            assert torch.equal(getattr(tree, name)[b, : n + 1], getattr(smaller, name)[b, : n + 1]), name


@on_devices
@given(seeds, st.integers(1, 5), st.integers(1, 6), st.integers(1, 40), st.integers(0, 40), kinds)
@settings(max_examples=100, deadline=None)
def test_follows_its_definition(device, rng, batch, levels, width, size, kind):
    check(random_call(rng, batch, levels, width, size, kind), device)


@on_devices
@pytest.mark.parametrize(("batch", "size"), [(1, 1023), (40, 9), (70, 63), (257, 63), (3, 300), (240, 255)])
def test_many_trees_and_large_ones(device, batch, size):
    check(random_call(np.random.default_rng(batch), batch, 15, 64, size, "flat"), device)


@given(seeds, st.lists(st.integers(0, 3), min_size=1, max_size=4), kinds)
@settings(max_examples=200, deadline=None)
def test_no_other_choice_is_better(rng, room, kind):
    """Where a tree's nodes are worth ever less, as its drafter says."""
    call = random_call(rng, len(room), 3, 4, 3, kind)
    empty = AcceptanceTable.empty(2, DEPTHS, call.table.edges)
    price = torch.tensor(rng.choice([0.0, 1e-3, 0.1], len(room)))
    call = replace(
        call, table=empty, prices=replace(call.prices, price=price, most=torch.full_like(call.prices.most, 3))
    )
    _, found = call.run("cpu")
    value = [
        [units(x) for x in (row * k).clamp(max=1).tolist()]
        for row, k in zip(found.gains, call.prices.luck, strict=True)
    ]

    def net(nodes: tuple[int, ...]) -> int:
        return sum(sum(value[b][:n]) - n * units(price[b].item()) for b, n in enumerate(nodes)) - cost(
            call.prices, sum(nodes)
        )

    choices = itertools.product(*(range(n) for n in call.tree().n_nodes.tolist()))
    assert net(tuple(found.nodes.tolist())) == max(net(choice) for choice in choices)


@on_devices
@given(seeds, st.integers(1, 40), st.integers(1, 6), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_learning_counts_what_was_reached(device, rng, batch, levels, size):
    call = random_call(rng, batch, levels, 8, size, "flat")
    tree, found = call.run(device)
    walks = [walk(rng, tree, b) for b in range(batch)]
    cases, hits = (x.clone().flatten() for x in (call.table.cases, call.table.hits))
    for b, path in enumerate(walks):
        for node in range(1, int(found.nodes[b]) + 1):
            if int(tree.parent[b, node]) not in path:
                continue
            own = int(found.cells[b, node - 1])
            kind, _, before, bin_ = np.unravel_index(own, call.table.cases.shape)
            for cell in (own, int(np.ravel_multi_index((kind, 0, before, bin_), call.table.cases.shape))):
                cases[cell] += 1
                hits[cell] += node in path
    fade = torch.where(cases > MEMORY, 0.5, 1.0)
    table, given_tree, selection = (moved(x, device) for x in (call.table, tree, found))
    path = torch.tensor([p + [-1] * (tree.max_depth + 1 - len(p)) for p in walks], dtype=torch.int32, device=device)
    lengths = torch.tensor([len(p) for p in walks], dtype=torch.int32, device=device)
    tree_learn(table, given_tree, selection, AcceptedPath(path, lengths, lengths))
    for name, wanted in (("cases", cases * fade), ("hits", hits * fade)):
        assert torch.equal(getattr(table, name).flatten().cpu(), wanted), name


def walk(rng: np.random.Generator, tree: DraftTree, b: int) -> list[int]:
    """Some way down a tree."""
    path = [0]
    while rng.random() < 0.8:
        children = [n for n in range(1, int(tree.n_nodes[b])) if int(tree.parent[b, n]) == path[-1]]
        if not children:
            break
        path.append(int(rng.choice(children)))
    return path


@on_devices
def test_what_is_learned_counts_half_when_there_is_much_of_it(device):
    call = random_call(np.random.default_rng(0), 2, 3, 4, 5, "flat")
    table = replace(
        call.table, cases=torch.full_like(call.table.cases, MEMORY), hits=torch.full_like(call.table.hits, 11.0)
    )
    call = replace(call, table=table, prices=replace(call.prices, price=torch.tensor([-1.0, -1.0]).double()))
    tree, found = call.run(device)
    own = moved(table, device)
    root_only = torch.tensor([[0] + [-1] * tree.max_depth] * 2, dtype=torch.int32, device=device)
    ones = torch.ones(2, dtype=torch.int32, device=device)
    tree_learn(own, moved(tree, device), moved(found, device), AcceptedPath(root_only, ones, ones))
    changed = own.cases.cpu() != MEMORY
    assert changed.any() and (own.cases.cpu()[changed] <= MEMORY / 2 + 4).all()
    assert (own.hits.cpu()[changed] == 5.5).all() and (own.hits.cpu()[~changed] == 11).all()


@on_devices
def test_no_trees_and_trees_without_nodes(device):
    call = random_call(np.random.default_rng(0), 3, 2, 4, 0, "flat")
    tree, found = call.run(device)
    assert found.nodes.tolist() == [0, 0, 0] and tree.n_nodes.tolist() == [1, 1, 1] and found.gains.shape == (3, 0)
    none = torch.empty(0, dtype=torch.int32, device=device)
    nothing = tree_build(
        torch.empty(0, 2, 4, device=device), none.view(0, 1, 1).expand(0, 2, 4), none, none, none, max_budget=3
    )
    prices = Prices(
        none,
        none.float(),
        none,
        none.double(),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.float64, device=device),
    )
    found = tree_select(nothing, moved(call.table, device), prices)
    assert found.nodes.tolist() == []


@pytest.mark.skipif("cuda" not in DEVICES, reason="pinned memory is what a GPU reads in place")
def test_prices_in_pinned_memory():
    call = random_call(np.random.default_rng(0), 4, 5, 16, 20, "flat")
    pinned = replace(call.prices, **{name: x.pin_memory() for name, x in vars(call.prices).items()})
    tree = moved(call.tree(), "cuda")
    found = tree_select(tree, moved(call.table, "cuda"), pinned)
    assert found.nodes.tolist() == call.run("cuda")[1].nodes.tolist()


def test_arguments():
    call = random_call(np.random.default_rng(0), 2, 3, 4, 5, "flat")
    tree = call.tree()
    with pytest.raises(ValueError, match=r"prices.luck has shape \[1\]; pass \[2\]"):
        tree_select(tree, call.table, replace(call.prices, luck=call.prices.luck[:1]))
    with pytest.raises(ValueError, match=r"prices.price is torch.float32; pass torch.float64"):
        tree_select(tree, call.table, replace(call.prices, price=call.prices.price.float()))
    with pytest.raises(ValueError, match=r"prices\.at is empty"):
        tree_select(tree, call.table, replace(call.prices, at=call.prices.at[:0], cost=call.prices.cost[:0]))
    with pytest.raises(ValueError, match=r"table.hits has shape \[2, 5, 2, 5\]; pass \[2, 5, 2, 6\]"):
        tree_select(tree, replace(call.table, hits=call.table.hits[..., 1:]), call.prices)
