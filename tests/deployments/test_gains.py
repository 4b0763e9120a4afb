"""How often nodes are accepted is learned from those that were."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ddtree.deployments.gains import Gains, Worth
from ddtree.kernels import DraftTree, tree_accept, tree_build

BATCH, LEVELS, K, NODES = 8, 4, 5, 12


def draft(seed: int) -> tuple[DraftTree, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(BATCH, LEVELS, K, generator=generator)
    logprobs = logits.log_softmax(-1).sort(-1, descending=True).values
    ids = torch.stack([torch.randperm(50, generator=generator)[:K] for _ in range(BATCH * LEVELS)]).int()
    ids = ids.view(BATCH, LEVELS, K)
    one = torch.zeros(BATCH, dtype=torch.int32)
    return tree_build(logprobs, ids, one, one, one + NODES, max_budget=NODES), logprobs, ids


def test_at_first_the_drafter_is_believed() -> None:
    tree, logprobs, ids = draft(0)
    worth = Gains().worth(tree, logprobs, ids, [False] * BATCH)
    for b in range(BATCH):
        path = {0: 1.0}
        for node in range(1, NODES + 1):
            level = int(tree.depth[b, node]) - 1
            rank = ids[b, level].tolist().index(int(tree.tokens[b, node]))
            path[node] = path[int(tree.parent[b, node])] * float(logprobs[b, level, rank].exp())
            assert worth.gains[b, node - 1] == pytest.approx(path[node], rel=1e-5)


def test_padding_is_worth_nothing() -> None:
    _tree, logprobs, ids = draft(1)
    one = torch.zeros(BATCH, dtype=torch.int32)
    smaller = tree_build(logprobs, ids, one, one, one + 3, max_budget=NODES)
    gains = Gains().worth(smaller, logprobs, ids, [False] * BATCH).gains
    assert (gains[:, :3] > 0).all() and not gains[:, 3:].any()
    nothing = tree_build(torch.full_like(logprobs, -torch.inf), ids, one, one, one + 3, max_budget=3)
    assert not Gains().worth(nothing, logprobs, ids, [False] * BATCH).gains.any()


@pytest.mark.parametrize("trust", [0.5, 1.0, 1.4])
def test_forecasts_come_true(trust: float) -> None:
    """The target takes a token `trust` times as often as the drafter says while all before it were first choices, and never
    after that: within 10 % on drafts that were not learned from."""
    gains, random = Gains(), np.random.default_rng(0)

    def accepted(tree: DraftTree, logprobs: torch.Tensor, ids: torch.Tensor) -> list[list[int]]:
        y = torch.full(tree.tokens.shape, 99, dtype=torch.int32)
        for b in range(BATCH):
            for node in range(NODES + 1):
                level = int(tree.depth[b, node])
                straight = node == 0 or all(
                    int(tree.tokens[b, a]) == int(ids[b, int(tree.depth[b, a]) - 1, 0])
                    for a in range(1, node + 1)
                    if int(tree.ancestors[b, node, 0]) >> a & 1
                )
                if level < LEVELS and straight:
                    said = logprobs[b, level].exp().numpy().astype(float)
                    said *= trust
                    pick = random.random()
                    for chance, token in zip(said / max(1.0, said.sum()), ids[b, level].tolist(), strict=True):
                        pick -= chance
                        if pick < 0:
                            y[b, node] = token
                            break
        found = tree_accept(y, tree)
        return [path[:n] for path, n in zip(found.path.tolist(), found.n_accepted.tolist(), strict=True)]

    forecast = real = 0.0
    for seed in range(240):
        drafted = draft(seed)
        worth = gains.worth(*drafted, [False] * BATCH)
        paths = accepted(*drafted)
        if seed >= 160:
            forecast += worth.gains.sum()
            real += sum(len(path) - 1 for path in paths)
        gains.note(worth, [NODES] * BATCH, paths)
    assert forecast == pytest.approx(real, rel=0.1)


def test_only_verified_nodes_are_cases() -> None:
    gains = Gains()
    tree, logprobs, ids = draft(2)
    before: Worth = gains.worth(tree, logprobs, ids, [False] * BATCH)
    gains.note(before, [0] * BATCH, [[0]] * BATCH)
    assert np.array_equal(gains.worth(tree, logprobs, ids, [False] * BATCH).gains, before.gains)
    gains.note(before, [NODES] * BATCH, [[0]] * BATCH)  # all first tokens were wrong
    after = gains.worth(tree, logprobs, ids, [False] * BATCH).gains
    assert (after[:, 0] < before.gains[:, 0]).all()
    sampled = gains.worth(tree, logprobs, ids, [True] * BATCH).gains
    assert np.array_equal(sampled, before.gains), "draws at a temperature are another matter"
