"""Inputs of the benchmark: candidates, trees, paged caches. Random, and the same in every run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.kernels import DraftTree, Rows, reference

PAGE = 64
LEVELS, WIDTH = 15, 64  # a DFlash drafter's block, and the candidates kept of each position


def int32(values: list[int] | Tensor) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")


def full(count: int, value: int) -> Tensor:
    return torch.full((count,), value, dtype=torch.int32, device="cuda")


@dataclass(frozen=True)
class Candidates:
    """What a drafter leaves for tree_build."""

    logprobs: Tensor  # [B, L, K]
    ids: Tensor  # [B, L, K]
    root: Tensor  # [B]
    seq_len: Tensor  # [B]

    @classmethod
    def random(cls, batch: int, seed: int) -> Candidates:
        """Zipf-like rows, from sharp to nearly flat: a drafter is sure of some positions and not of others."""
        random = torch.Generator("cuda").manual_seed(seed)
        shape = (batch, LEVELS, 1)
        exponent = 0.5 + 4 * torch.rand(shape, generator=random, device="cuda")
        rank = torch.arange(1, WIDTH + 1, device="cuda")
        noise = 0.1 * torch.rand(*shape[:2], WIDTH, generator=random, device="cuda")
        logprobs = (-exponent * rank.log() - noise).sort(-1, descending=True).values.log_softmax(-1)
        ids = torch.rand(batch, LEVELS, 4096, generator=random, device="cuda").topk(WIDTH).indices.int()
        return cls(logprobs, ids, full(batch, 7), full(batch, 1000))

    def conditional(self, seed: int) -> Tensor:
        """[B, L-1, K, K] what tree_build_path takes beside first = logprobs[:, 0]: a parent changes the odds of some of its
        children."""
        random = torch.Generator("cuda").manual_seed(seed)
        rows = self.logprobs[:, 1:, None].expand(-1, -1, self.logprobs.shape[2], -1)
        return (rows + torch.randn(rows.shape, generator=random, device="cuda").pow(3)).log_softmax(-1)

    def tree(self, budget: int) -> DraftTree:
        """The tree by the reference, on the device."""
        wanted = torch.full_like(self.root, budget)
        return reference.tree_build(self.logprobs, self.ids, self.root, self.seq_len, wanted, max_budget=budget)


def answers(tree: DraftTree, depth: int = 5) -> Tensor:
    """The target's token at each node, such that it agrees with the drafter's best path as far as `depth`."""
    y = torch.full_like(tree.tokens, -2)
    node, sequence = torch.zeros_like(tree.n_nodes), torch.arange(len(tree.n_nodes), device=y.device)
    for _ in range(depth):
        child = tree.first_child[sequence, node]
        has = child >= 0
        child = torch.where(has, child, 0)
        y[sequence, node] = torch.where(has, tree.tokens[sequence, child], y[sequence, node])
        node = torch.where(has, child, node)
    return y


def tree_rows(tree: DraftTree, seq_len: int, page_table: Tensor, page_size: int = PAGE) -> Rows:
    """Rows of one tree per sequence, all nodes in use."""
    batch, nodes, words = tree.ancestors.shape
    return Rows(
        row_offsets=int32([nodes * s for s in range(batch + 1)]),
        q_len=tree.n_nodes,
        seq_len=full(batch, seq_len),
        page_table=page_table,
        page_size=page_size,
        causal=torch.zeros(batch, dtype=torch.bool, device="cuda"),
        ancestors=tree.ancestors.view(batch * nodes, words),
    )


def page_tables(sets: int, batch: int, slots: int) -> tuple[int, list[Tensor]]:
    """Pages of the cache, and one table [batch, pages] per input set: no page is used twice, and none lies in order."""
    pages = -(-slots // PAGE)
    tables = torch.randperm(sets * batch * pages, device="cuda").int().view(sets, batch, pages)
    return sets * batch * pages, list(tables)


def slots_of(page_table: Tensor, count: int) -> Tensor:
    """Flat slots of a sequence's first `count` rows; page_table [pages]."""
    return (page_table.long()[:, None] * PAGE + torch.arange(PAGE, device="cuda")).flatten()[:count]


def see(ancestors: Tensor, nodes: int) -> Tensor:
    """[n, W] ancestor words → [n, nodes] bool."""
    node = torch.arange(nodes, device=ancestors.device)
    return ((ancestors[:, node // 32] >> (node % 32)) & 1).bool()
