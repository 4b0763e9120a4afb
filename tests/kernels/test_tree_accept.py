"""tree_accept against listing every path, and its edge cases."""

from __future__ import annotations

import statistics
import time
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.kernels import AcceptedPath, DraftTree, reference, tree_accept, tree_build, tree_walker

from .devices import on_devices, poisoned_memory
from .ref import deepest_agreed
from .strategies import candidates, kinds, seeds, token_ids


def random_trees(rng: np.random.Generator, batch: int, levels: int, width: int, size: int, kind: str) -> DraftTree:
    logprobs = np.array([candidates(rng, levels, width, kind) for _ in range(batch)], np.float32)
    ids = np.array([token_ids(rng, levels, width) for _ in range(batch)], np.int32)
    root = torch.zeros(batch, dtype=torch.int32)
    budget = torch.from_numpy(rng.integers(0, size + 1, batch).astype(np.int32))
    return tree_build(torch.from_numpy(logprobs), torch.from_numpy(ids), root, root, budget, max_budget=size)


def lucky_draws(rng: np.random.Generator, tree: DraftTree) -> torch.Tensor:
    """The target's token at every node: often that of some child, so that walks go deep; 0 and garbage elsewhere."""
    y = rng.integers(-1, 6, tree.tokens.shape).astype(np.int32)
    for b, parents in enumerate(tree.parent.tolist()):
        for node, parent in enumerate(parents):
            if parent >= 0 and rng.random() < 0.6:
                y[b, parent] = tree.tokens[b, node]
    return torch.from_numpy(y)


def on(device: str, tree: DraftTree) -> DraftTree:
    return DraftTree(**{name: x.to(device) if torch.is_tensor(x) else x for name, x in vars(tree).items()})


@on_devices
@given(seeds, st.integers(1, 5), st.integers(1, 6), st.integers(1, 6), st.integers(0, 40), kinds)
@settings(max_examples=150, deadline=None)
def test_equals_the_deepest_path_that_agrees(device, rng, batch, levels, width, size, kind):
    tree = random_trees(rng, batch, levels, width, size, kind)
    y = lucky_draws(rng, tree)
    accepted = tree_accept(y.to(device), on(device, tree))
    assert accepted.path.shape == (batch, tree.max_depth + 1)
    for b in range(batch):
        n = int(tree.n_nodes[b])
        path = deepest_agreed(y[b].tolist(), tree.tokens[b].tolist(), tree.parent[b].tolist(), n)
        assert accepted.path[b].tolist() == path + [-1] * (tree.max_depth + 1 - len(path))
        assert accepted.n_accepted[b] == len(path)
        assert accepted.bonus[b] == y[b, path[-1]]
    walk = tree_walker(on(device, tree))  # made ready before y
    lengths = accepted.n_accepted.tolist()
    assert walk(y.tolist()) == [path[:n] for path, n in zip(accepted.path.tolist(), lengths, strict=True)]
    known = rng.integers(1, size + 2)  # the target was asked at so many nodes
    paths = walk([row[:known] for row in y.tolist()])
    wanted = [[node for node in path if 0 <= node < known] for path in accepted.path.tolist()]
    assert paths == wanted
    assert {accepted.path.dtype, accepted.n_accepted.dtype, accepted.bonus.dtype} == {torch.int32}


@on_devices
@given(seeds, st.integers(0, 20))
@settings(max_examples=20, deadline=None)
def test_a_tree_and_its_path_are_made_where_the_caller_says(device, rng, size):
    """Garbage there does not matter. On a GPU the small inputs and outputs may be in pinned memory of the host."""
    batch, levels, pinned = 3, 4, device == "cuda"
    values = np.array([candidates(rng, levels, 4, "peaky") for _ in range(batch)], np.float32)
    names = np.array([token_ids(rng, levels, 4) for _ in range(batch)], np.int32)
    logprobs, ids = torch.from_numpy(values).to(device), torch.from_numpy(names).to(device)
    numbers = torch.tensor([[7] * batch, [30] * batch, [size, 0, size // 2]], dtype=torch.int32)
    small = [row.pin_memory() if pinned else row for row in numbers]
    given_ = (logprobs, ids, *small)
    expected = tree_build(*given_, max_budget=size)
    room = DraftTree.allocate(batch, levels, size, partial(torch.full, fill_value=99, dtype=torch.int32, device=device))
    tree = tree_build(*given_, max_budget=size, out=room)
    assert tree is room
    assert all(torch.equal(x, getattr(expected, name)) for name, x in vars(tree).items() if torch.is_tensor(x))

    y = lucky_draws(rng, on("cpu", tree)).to(device)
    garbage = partial(torch.full, fill_value=99, dtype=torch.int32, pin_memory=pinned)
    walk = AcceptedPath.allocate(batch, tree.max_depth, garbage)
    accepted = tree_accept(y, tree, out=walk)
    if pinned:
        torch.cuda.synchronize()
    assert accepted is walk
    assert all(torch.equal(x, getattr(tree_accept(y, expected), name).cpu()) for name, x in vars(walk).items())


def test_memory_of_another_size_is_refused():
    tree = chain([4, 5], size=4)
    with pytest.raises(ValueError, match=r"out.path has shape \[1, 5\]; pass \[1, 2\]"):
        room = AcceptedPath.allocate(1, 4, partial(torch.empty, dtype=torch.int32))
        tree_accept(torch.zeros_like(tree.tokens), tree, out=room)
    one = torch.ones(1, dtype=torch.int32)
    given_ = (torch.zeros(1, 3, 1), torch.zeros(1, 3, 1, dtype=torch.int32), one, one, one)
    with pytest.raises(ValueError, match="out has max_depth 1; allocate it for 3 levels"):
        tree_build(*given_, max_budget=4, out=tree)
    with pytest.raises(ValueError, match=r"out\.tokens has shape"):
        tree_build(*given_, max_budget=3, out=tree)


def chain(tokens: list[int], size: int) -> DraftTree:
    levels = len(tokens) - 1
    ids = torch.tensor(tokens[1:], dtype=torch.int32).view(1, levels, 1)
    one = torch.ones(1, dtype=torch.int32)
    return tree_build(torch.zeros(1, levels, 1), ids, one * tokens[0], one, one * levels, max_budget=size)


def accept(tree: DraftTree, y: list[int], device: str = "cpu") -> AcceptedPath:
    return tree_accept(torch.tensor([y], dtype=torch.int32, device=device), on(device, tree))


@on_devices
def test_padding_is_no_token(device):
    """Padding carries token 0 and so does the draw: it must not be taken for a child."""
    accepted = accept(chain([4, 5], size=4), [5, 0, 0, 0, 0], device)
    assert (accepted.path.tolist(), accepted.n_accepted.tolist(), accepted.bonus.tolist()) == ([[0, 1]], [2], [0])


@on_devices
def test_token_0_is_a_token(device):
    accepted = accept(chain([0, 0, 0], size=2), [0, 0, 9], device)
    assert (accepted.path.tolist(), accepted.bonus.tolist()) == ([[0, 1, 2]], [9])


@on_devices
def test_a_miss_at_the_root_still_gives_a_token(device):
    accepted = accept(chain([4, 5, 6], size=2), [7, 6, 6], device)
    assert (accepted.path.tolist(), accepted.n_accepted.tolist(), accepted.bonus.tolist()) == ([[0, -1, -1]], [1], [7])


@on_devices
def test_no_sequences(device):
    none = torch.zeros(0, dtype=torch.int32)
    tree = tree_build(torch.zeros(0, 3, 2), torch.zeros(0, 3, 2, dtype=torch.int32), none, none, none, max_budget=5)
    accepted = tree_accept(torch.zeros(0, 6, dtype=torch.int32, device=device), on(device, tree))
    assert (accepted.path.shape, accepted.bonus.shape) == ((0, 4), (0,))


def test_arguments():
    tree = chain([4, 5], size=1)
    with pytest.raises(ValueError, match=r"y has shape \[1, 3\]; pass \[1, 2\]"):
        accept(tree, [1, 2, 3])
    with pytest.raises(ValueError, match=r"y is torch.int64; pass torch.int32"):
        tree_accept(torch.zeros(1, 2, dtype=torch.int64), tree)


@pytest.mark.timed
def test_eight_trees_take_less_than_half_a_millisecond():
    rng = np.random.default_rng(0)
    tree = random_trees(rng, 8, 15, 32, 32, "peaky")
    y = lucky_draws(rng, tree)

    def seconds() -> float:
        begin = time.perf_counter()
        tree_accept(y, tree)
        return time.perf_counter() - begin

    assert min(statistics.median(seconds() for _ in range(21)) for _ in range(10)) < 5e-4


if torch.cuda.is_available():

    @given(seeds, st.integers(1, 33), st.integers(0, 31), st.integers(1, 128), st.integers(0, 1023), kinds)
    @settings(max_examples=100, deadline=None)
    def test_cuda_equals_the_reference(rng, batch, levels, width, size, kind):
        tree = random_trees(rng, batch, levels, width, size, kind)
        y = lucky_draws(rng, tree)
        expected = reference.tree_accept(y, tree)
        with poisoned_memory():
            actual = tree_accept(y.cuda(), on("cuda", tree))
        for name in ("path", "n_accepted", "bonus"):
            assert torch.equal(getattr(actual, name).cpu(), getattr(expected, name)), name
