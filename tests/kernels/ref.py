"""Oracles for the kernel tests: brute force, written from the contract and sharing no code with the package."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor


def enumerate_prefixes(logprobs: np.ndarray, budget: int) -> list[tuple[int, ...]]:
    """The first `budget` rank paths of the tree order, found by listing every path. logprobs [L, K] float32."""
    levels, width = logprobs.shape
    order: dict[tuple[int, ...], int] = {(): 0}  # position among the paths of its own depth
    keyed = []
    for depth in range(1, levels + 1):
        paths = []
        for path in itertools.product(range(width), repeat=depth):
            steps = [logprobs[d, r] for d, r in enumerate(path)]
            if all(np.isfinite(step) for step in steps):
                score = np.float32(0)
                for step in steps:
                    score = np.float32(score + step)
                paths.append((-score, order[path[:-1]], path[-1], path))
        paths.sort()
        for position, (cost, _, _, path) in enumerate(paths):
            order[path] = position
            keyed.append((cost, depth, position, path))
    return [path for *_, path in sorted(keyed)[:budget]]


def enumerate_paths(first: np.ndarray, conditional: np.ndarray, levels: int, budget: int) -> list[tuple[int, ...]]:
    """The first `budget` candidate paths where log-probs depend on the parent, found by listing every path.

    first [K], conditional [L-1, K, K] float32.
    """
    order: dict[tuple[int, ...], int] = {(): 0}  # position among the paths of its own depth
    scores: dict[tuple[int, ...], np.float32] = {(): np.float32(0)}
    keyed = []
    for depth in range(1, levels + 1):
        paths = []
        for parent in [path for path in order if len(path) == depth - 1]:
            row = first if depth == 1 else conditional[depth - 2, parent[-1]]
            ranked = sorted((-value, j) for j, value in enumerate(row) if np.isfinite(value))
            for rank, (cost, j) in enumerate(ranked):
                scores[*parent, j] = np.float32(scores[parent] - cost)
                paths.append((-scores[*parent, j], order[parent], rank, (*parent, j)))
        paths.sort()
        for position, (cost, _, _, path) in enumerate(paths):
            order[path] = position
            keyed.append((cost, depth, position, path))
    return [path for *_, path in sorted(keyed)[:budget]]


def search_by_level(logprobs: np.ndarray, budget: int) -> list[tuple[int, ...]]:
    """The same for large sizes: a node with `budget` better ones at its own depth cannot be in the answer."""
    frontier: list[tuple[int, ...]] = [()]
    scores = np.zeros(1, np.float32)
    keyed = []
    for depth, row in enumerate(logprobs, 1):
        rank = np.flatnonzero(np.isfinite(row))
        total = (scores[:, None] + row[None, rank]).astype(np.float32)  # rows: parents in order, columns: ranks
        best = np.argsort(-total.ravel(), kind="stable")[:budget]
        frontier = [(*frontier[i // len(rank)], int(rank[i % len(rank)])) for i in best]
        scores = total.ravel()[best]
        keyed += [
            (-score, depth, position, path) for position, (score, path) in enumerate(zip(scores, frontier, strict=True))
        ]
    return [path for *_, path in sorted(keyed)[:budget]]


def tree_fields(paths: list[tuple[int, ...]], ids: np.ndarray, root: int, seq_len: int, size: int) -> dict[str, list]:
    """Every field of one tree of `size` slots from its rank paths in order, each by its plainest definition."""
    nodes = [(), *paths]
    index = {path: i for i, path in enumerate(nodes)}
    parent = [-1] + [index[path[:-1]] for path in paths]
    count, pad = len(nodes), size - len(nodes)
    visible = [{index[path[:d]] for d in range(len(path) + 1)} for path in nodes]
    words = (size + 31) // 32
    bits = [[sum(1 << (j - 32 * w) for j in seen if j // 32 == w) for w in range(words)] for seen in visible]
    children = [[c for c in range(count) if parent[c] == i] for i in range(count)]
    later = [[c for c in range(i + 1, count) if parent[c] == parent[i]] for i in range(count)]
    return {
        "tokens": [root, *(int(ids[len(path) - 1, path[-1]]) for path in paths)] + [0] * pad,
        "parent": parent + [-1] * pad,
        "depth": [len(path) for path in nodes] + [0] * pad,
        "position": [seq_len + len(path) for path in nodes] + [0] * pad,
        "first_child": [min(c, default=-1) for c in children] + [-1] * pad,
        "next_sibling": [min(c, default=-1) for c in later] + [-1] * pad,
        "ancestors": bits + [[0] * words] * pad,
        "n_nodes": count,
    }


def deepest_agreed(y: list[int], tokens: list[int], parent: list[int], n_nodes: int) -> list[int]:
    """The longest path from the root on which every token is the target's own at the parent."""
    best = [0]
    for node in range(1, n_nodes):
        path = [node]
        while path[0]:
            path.insert(0, parent[path[0]])
        if all(tokens[b] == y[a] for a, b in itertools.pairwise(path)) and len(path) > len(best):
            best = path
    return best


def slot(page_table: list[int], page_size: int, row: int) -> tuple[int, int]:
    return page_table[row // page_size], row % page_size


def compact(cache: Tensor, page_table: list[int], page_size: int, seq_len: int, path: list[int]) -> Tensor:
    """One sequence's rows moved one by one, read from an untouched copy."""
    result = cache.clone()
    for i, node in enumerate(path):
        source, target = slot(page_table, page_size, seq_len + node), slot(page_table, page_size, seq_len + i)
        result[:, target[0], target[1]] = cache[:, source[0], source[1]]
    return result


def attention_row(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One query head over the rows it may see, in float64. q [D], keys [n, D], values [n, Dv] → out [Dv], lse []."""
    scores = (keys.double() * q.double()).sum(-1) * scale
    weights = (scores - scores.max()).exp()
    return (weights[:, None] * values.double()).sum(0) / weights.sum(), scores.max() + weights.sum().log()


def compare(actual: Tensor, expected: Tensor, *, atol: float, rtol: float, cosine: float = 1e-3) -> None:
    """Asserts that NaN and ±inf lie at the same places, then absolute-or-relative error, then the angle."""
    assert actual.shape == expected.shape
    a, e = actual.double(), expected.double()
    for name, where in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        assert torch.equal(where(a), where(e)), f"{name} at other places than expected"
    finite = torch.isfinite(e)
    a, e = a[finite], e[finite]
    excess = (a - e).abs() - (atol + rtol * e.abs())
    assert not (excess > 0).any(), f"largest absolute error {(a - e).abs().max():.3g}"
    if norms := float(a.norm() * e.norm()):
        assert 1 - float(a @ e) / norms <= cosine, "direction differs"
