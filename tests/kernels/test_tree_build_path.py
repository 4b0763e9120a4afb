"""tree_build_path against brute force and against tree_build, its edge cases; CUDA bit for bit against the reference."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree.kernels import DraftTree, reference, tree_build_path

from .devices import on_devices, poisoned_memory
from .ref import enumerate_paths, tree_fields
from .strategies import KINDS, candidates, kinds, seeds, token_ids

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


def random_rows(rng: np.random.Generator, levels: int, width: int, kind: str) -> Rows:
    """first [K], conditional [L-1, K, K] in no order, ids [L, K]."""
    below = max(levels - 1, 0)
    rows = rng.permuted(candidates(rng, 1 + below * width, width, kind), axis=1)
    return rows[0], rows[1:].reshape(below, width, width), token_ids(rng, levels, width)


def inputs(batch: list[Rows], budgets: list[int]) -> list[Tensor]:
    """The root of sequence b is token b, so that token 0 is a root as well."""
    root = torch.arange(len(budgets), dtype=torch.int32)
    rows = [torch.from_numpy(np.stack(x)) for x in zip(*batch, strict=True)]
    return [*rows, root, 7 + root, torch.tensor(budgets).int()]


def build(batch: list[Rows], budgets: list[int], size: int, device: str = "cpu") -> DraftTree:
    with poisoned_memory():
        return tree_build_path(*(x.to(device) for x in inputs(batch, budgets)), max_budget=size)


def same(actual: DraftTree, expected: DraftTree) -> None:
    """Every field, bit for bit."""
    for field in dataclasses.fields(DraftTree):
        a, b = getattr(actual, field.name), getattr(expected, field.name)
        assert torch.equal(a.cpu(), b.cpu()) if isinstance(b, Tensor) else a == b, field.name


@on_devices
@given(seeds, st.integers(0, 4), st.integers(0, 5), st.lists(st.integers(0, 40), min_size=1, max_size=3), kinds)
@settings(max_examples=100, deadline=None)
def test_equals_listing_every_path(device, rng, levels, width, budgets, kind):
    batch = [random_rows(rng, levels, width, kind) for _ in budgets]
    size = max(budgets) + int(rng.integers(0, 3))
    tree = build(batch, budgets, size, device)
    for b, (first, conditional, ids) in enumerate(batch):
        paths = enumerate_paths(first, conditional, levels, budgets[b])
        for name, values in tree_fields(paths, ids, b, 7 + b, size + 1).items():
            expected = np.array(values, np.int64).astype(np.uint32).astype(np.int32)
            np.testing.assert_array_equal(getattr(tree, name)[b].cpu().numpy(), expected, err_msg=name)
        for node, path in enumerate(paths, 1):
            score = np.float32(0)
            for d, j in enumerate(path):
                score = np.float32(score + (conditional[d - 1, path[d - 1], j] if d else first[j]))
            assert tree.score[b, node] == score


@on_devices
@given(seeds, st.integers(1, 15), st.integers(1, 64), st.sampled_from([0, 5, 63, 64, 300]), kinds)
@settings(max_examples=25, deadline=None)
def test_rows_that_depend_on_no_parent_make_the_tree_of_tree_build(device, rng, levels, width, size, kind):
    logprobs = np.stack([candidates(rng, levels, width, kind) for _ in range(2)])
    ids = np.stack([token_ids(rng, levels, width) for _ in range(2)])
    repeated = logprobs[:, 1:, None].repeat(width, 2)
    batch = list(zip(logprobs[:, 0], repeated, ids, strict=True))
    given_ = inputs(batch, [size, size // 2])
    same(
        tree_build_path(*(x.to(device) for x in given_), max_budget=size),
        reference.tree_build(torch.from_numpy(logprobs), *given_[2:], max_budget=size),
    )


@on_devices
@given(seeds, st.integers(0, 31), st.integers(1, 128), st.integers(0, 1023), st.integers(1, 4), kinds)
@settings(max_examples=20, deadline=None)
def test_equals_the_reference(device, rng, levels, width, size, batch, kind):
    rows = [random_rows(rng, levels, width, kind) for _ in range(batch)]
    budgets = rng.integers(0, size + 1, batch).tolist()
    expected = reference.tree_build_path(*inputs(rows, budgets), max_budget=size)
    same(build(rows, budgets, size, device), expected)


@on_devices
@pytest.mark.parametrize(("levels", "width", "budget"), [(15, 64, 63), (64, 128, 1023)])
def test_largest_sizes(device, levels, width, budget):
    """Of what fits in shared memory as a whole, and of what does not."""
    rows = [random_rows(np.random.default_rng(3), levels, width, "peaky")]
    expected = reference.tree_build_path(*inputs(rows, [budget]), max_budget=budget)
    assert expected.n_nodes.tolist() == [budget + 1]
    same(build(rows, [budget], budget, device), expected)


@on_devices
def test_a_parent_decides_which_child_is_best(device):
    log = partial(np.log, dtype=np.float32)
    rows = log([0.7, 0.2]), log([[[0.1, 0.8], [0.6, 0.3]]]), np.array([[5, 6], [7, 8]], np.int32)
    tree = build([rows], [5], 6, device)
    assert tree.tokens.tolist() == [[0, 5, 8, 6, 7, 7, 0]]
    assert tree.parent.tolist() == [[-1, 0, 1, 0, 3, 1, -1]]


@on_devices
def test_equal_siblings_come_in_the_order_of_candidates(device):
    first = np.array([-1, -0.0, -1, 0.0, -np.inf, np.nan], np.float32)
    rows = first, np.empty((0, 6, 6), np.float32), np.arange(10, 16, dtype=np.int32)[None]
    assert build([rows], [6], 6, device).tokens.tolist() == [[0, 11, 13, 10, 12, 0, 0]]


@on_devices
@pytest.mark.parametrize(("levels", "width", "budget"), [(3, 4, 0), (0, 4, 5), (3, 0, 5), (0, 0, 0)])
def test_root_only(device, levels, width, budget):
    rows = np.zeros(width, np.float32), np.zeros((max(levels - 1, 0), width, width), np.float32)
    tree = build([(*rows, np.ones((levels, width), np.int32))], [budget], 5, device)
    assert tree.n_nodes.tolist() == [1]
    assert tree.position.tolist() == [[7, 0, 0, 0, 0, 0]]
    assert tree.max_depth == min(levels, 5)


@on_devices
def test_builds_in_place(device):
    rng = np.random.default_rng(0)
    given_ = [x.to(device) for x in inputs([random_rows(rng, 5, 8, kind) for kind in KINDS], [20] * len(KINDS))]
    out = DraftTree.allocate(len(KINDS), 5, 20, partial(torch.full, fill_value=-7, dtype=torch.int32, device=device))
    assert tree_build_path(*given_, max_budget=20, out=out) is out
    same(out, tree_build_path(*given_, max_budget=20))


def test_arguments():
    first, conditional, *numbers = inputs([random_rows(np.random.default_rng(0), 3, 4, "peaky")], [2])
    with pytest.raises(ValueError, match=r"conditional has shape \[1, 2, 4, 3\]; pass \[1, 2, 4, 4\]"):
        tree_build_path(first, conditional[..., :3], *numbers, max_budget=2)
    with pytest.raises(ValueError, match=r"first is torch.float64; pass torch.float32"):
        tree_build_path(first.double(), conditional, *numbers, max_budget=2)
    with pytest.raises(ValueError, match=r"budget must be 0 … max_budget = 1; got \[2\]"):
        tree_build_path(first, conditional, *numbers, max_budget=1)
    with pytest.raises(ValueError, match="≤ 0"):
        tree_build_path(first, conditional + 40, *numbers, max_budget=2)


if torch.cuda.is_available():

    @pytest.mark.parametrize("size", [20, 1023])
    def test_cuda_graphs_replay_with_other_contents(size):
        rng = np.random.default_rng(0)
        made = [
            inputs([random_rows(rng, 15, 64, kind) for kind in ("peaky", "flat")], [size, size // 2]) for _ in range(2)
        ]
        given_ = [x.cuda() for x in made[0]]
        out = tree_build_path(*given_, max_budget=size)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tree_build_path(*given_, max_budget=size, out=out)
        for there, other in zip(given_, made[1], strict=True):
            there.copy_(other)
        graph.replay()
        same(out, reference.tree_build_path(*made[1], max_budget=size))
