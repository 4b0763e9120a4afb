"""Stage 4: acceptance length of chain and best-first trees, greedy, offline and exact. Knows no training.

A greedy answer does not depend on the drafter. So a round that begins at an answer token is: draft there, grow the tree, follow
the answer while its next token is a child. Acceptance length = accepted tokens + the bonus token.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree.drafter.dflash import DFlashModel
from ddtree.drafter.items import Candidates
from ddtree.drafter.path_head import PathHead
from ddtree.drafter.training.masks import AnchorMask, DocumentMask
from ddtree.drafter.training.ragged import Tokens
from ddtree.drafter.training.target import Target
from ddtree.kernels import tree_build_path

BUDGETS = (8, 16, 32, 63)
CANDIDATES = 64  # per slot: a tree of 63 nodes never needs more
BLOCKS_AT_ONCE = 64


@dataclass(frozen=True)
class Sample:
    """A greedy answer to measure on."""

    name: str  # of its set: a row of the table
    tokens: Tokens  # prompt and answer
    prompt_length: int


def nested_depths(logprobs: Sequence[Sequence[float]], rank: Sequence[int], budgets: Sequence[int]) -> dict[int, int]:
    """Tokens that the best-first trees of each budget accept in one round.

    The B most likely prefixes under independent slots are nested in B, so one expansion serves all budgets (DDTree, algorithm 1).

    Args:
        logprobs: `[L][K]`, each row descending.
        rank: `[L]`, where the answer's token stands in its row; K or more: nowhere.
        budgets: numbers of tree nodes, the root not counted.
    """
    slots, width = len(logprobs), len(logprobs[0])
    heap, depth, out = [(-logprobs[0][0], 0, 0, True)], 0, dict.fromkeys(budgets, -1)
    for nodes in range(1, max(budgets) + 1):
        if not heap:
            break
        cost, d, r, on_path = heapq.heappop(heap)
        hit = on_path and r == rank[d]
        depth = d + 1 if hit else depth
        if nodes in out:
            out[nodes] = depth
        if r + 1 < width:
            heapq.heappush(heap, (cost + logprobs[d][r] - logprobs[d][r + 1], d, r + 1, on_path))
        if d + 1 < slots:
            heapq.heappush(heap, (cost - logprobs[d + 1][0], d + 1, 0, hit))
    return {budget: depth if found < 0 else found for budget, found in out.items()}


def nested_path_depths(
    first: Tensor, conditional: Tensor, rank: Sequence[int], budgets: Sequence[int]
) -> dict[int, int]:
    """The same for trees that `tree_build_path` grows, from first `[K]` and conditional `[L-1, K, K]`.

    Its nodes come in order, so the first B are the tree of budget B.
    """
    levels, (k,), most = len(rank), first.shape, max(budgets)
    candidates = torch.arange(k, dtype=torch.int32).expand(1, levels, k)  # stand for their tokens
    zero = torch.zeros(1, dtype=torch.int32)
    tree = tree_build_path(first[None], conditional[None], candidates, zero, zero, zero + most, max_budget=most)
    on_path = [0]
    for node, (parent, candidate) in enumerate(zip(tree.parent[0].tolist(), tree.tokens[0].tolist(), strict=True)):
        if parent == on_path[-1] and len(on_path) <= levels and candidate == rank[len(on_path) - 1]:
            on_path.append(node)
    return {budget: bisect_right(on_path, budget) - 1 for budget in budgets}


@torch.no_grad()
def measure(
    model: DFlashModel,
    target: Target,
    samples: Iterable[Sample],
    budgets: Sequence[int] = BUDGETS,
    longest: int = 128,
    *,
    head: PathHead | None = None,
    candidates: int = CANDIDATES,
) -> dict[str, dict[str, float]]:
    """Mean acceptance length per set: `{set: {"chain": …, "8": …, …, "rounds": chain rounds}}`.

    Rounds start at the first `longest` answer tokens. `model` takes unscaled features. `head`: its path head, by which chain and
    trees are chosen then.
    """
    sums: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for sample in samples:
        starts = min(len(sample.tokens) - sample.prompt_length - 1, longest)
        if starts < 1:
            continue
        rounds = _Rounds(model, target, sample, starts, budgets, _Ranking(head, candidates))
        for column in ("chain", *map(str, budgets)):
            at = count = 0
            while at < starts:
                at += rounds.accepted(at, column) + 1
                count += 1
            total = sums[sample.name][column]
            total[0] += at
            total[1] += count
    table = {}
    for name, columns in sums.items():
        table[name] = {column: round(tokens / max(1, count), 3) for column, (tokens, count) in columns.items()}
        table[name]["rounds"] = columns["chain"][1]
    return table


@dataclass(frozen=True)
class _Ranking:
    """How a slot's candidates are chosen and ranked."""

    head: PathHead | None
    candidates: int


class _Rounds:
    """Drafts at every start of one sample at once; trees are grown only for the rounds that are walked."""

    def __init__(
        self, model: DFlashModel, target: Target, sample: Sample, starts: int, budgets: Sequence[int], ranking: _Ranking
    ) -> None:
        ids = torch.as_tensor(sample.tokens.astype("int64"), device=target.device)
        features = _features(target, ids, model.config.target_layer_ids)
        drafted = [
            _draft(
                model, target, ids, features, range(a, min(a + BLOCKS_AT_ONCE, sample.prompt_length + starts)), ranking
            )
            for a in range(sample.prompt_length, sample.prompt_length + starts, BLOCKS_AT_ONCE)
        ]
        self.logprobs = torch.cat([logprobs for logprobs, _, _ in drafted]).tolist()
        self.rank = torch.cat([rank for _, rank, _ in drafted]).tolist()
        below = [rows for _, _, rows in drafted if rows is not None]
        self.conditional = torch.cat(below).cpu() if below else None
        self.budgets = budgets
        self.trees: dict[int, dict[int, int]] = {}

    def accepted(self, at: int, column: str) -> int:
        """Draft tokens that the round whose bonus is answer token `at` accepts."""
        rank, below = self.rank[at], None if self.conditional is None else self.conditional[at]
        if column == "chain":
            chain = _chain(self.logprobs[at][0], below) if below is not None else [0] * len(rank)
            return next((d for d, (r, c) in enumerate(zip(rank, chain, strict=True)) if r != c), len(rank))
        if at not in self.trees and below is not None:
            self.trees[at] = nested_path_depths(torch.tensor(self.logprobs[at][0]), below, rank, self.budgets)
        elif at not in self.trees:
            self.trees[at] = nested_depths(self.logprobs[at], rank, self.budgets)
        return self.trees[at][int(column)]


def _chain(first: list[float], conditional: Tensor) -> list[int]:
    """`[L]` the best candidate of each slot after that of the slot before."""
    chain = [max(range(len(first)), key=first.__getitem__)]
    for rows in conditional:
        chain.append(int(rows[chain[-1]].argmax()))
    return chain


def _draft(
    model: DFlashModel, target: Target, ids: Tensor, features: Tensor, anchors: range, ranking: _Ranking
) -> tuple[Tensor, Tensor, Tensor | None]:
    """ids `[T]` → log-probabilities `[A, L, K]` descending, the rank `[A, L]` of the text's token in them (K: none), and with a
    path head what `Candidates.conditional` holds."""
    config, device = model.config, ids.device
    context = torch.arange(len(ids), device=device)[None]
    anchor = torch.arange(anchors.start, anchors.stop, device=device)
    at = anchor[:, None] + torch.arange(config.block_size, device=device)
    block = torch.full_like(at, config.mask_token_id)
    block[:, 0] = ids[anchor]
    mask = AnchorMask(1, len(ids), len(anchor), config.block_size, device)
    mask.anchor.copy_(anchor[None])
    embedded = F.embedding(block.flatten()[None], target.embedding)
    hidden = model(embedded, at.flatten()[None], model.fuse(features), context, mask.dense())
    slots = hidden[0].unflatten(0, at.shape)[:, 1:]
    logits = F.linear(slots, target.head).float()
    top, index = logits.log_softmax(-1).topk(min(ranking.candidates, logits.shape[-1]), -1)
    drafted = Candidates(top, index)
    if ranking.head:
        drafted = ranking.head.given_the_path(drafted, slots, ids[anchor])
    inside = at[:, 1:] < len(ids)
    wanted = torch.where(inside, ids[at[:, 1:].clamp(max=len(ids) - 1)], -1)
    found = index == wanted[:, :, None]
    rank = torch.where(found.any(-1), found.int().argmax(-1), top.shape[-1])
    return drafted.logprobs, rank, drafted.conditional


def _features(target: Target, ids: Tensor, layer_ids: tuple[int, ...]) -> Tensor:
    mask = DocumentMask(1, len(ids), ids.device)
    positions = torch.arange(len(ids), device=ids.device)[None]
    return target.observe(ids[None], positions, layer_ids, mask.dense())[0]
