"""Stage 4: acceptance length of chain and best-first trees, greedy, offline and exact. Knows no training.

A greedy answer does not depend on the drafter. So a round that begins at an answer token is: draft there, grow the tree, follow
the answer while its next token is a child. Acceptance length = accepted tokens + the bonus token.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree.drafter.dflash import DFlashModel
from ddtree.drafter.training.masks import AnchorMask, DocumentMask
from ddtree.drafter.training.ragged import Tokens
from ddtree.drafter.training.target import Target

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


@torch.no_grad()
def measure(
    model: DFlashModel, target: Target, samples: Iterable[Sample], budgets: Sequence[int] = BUDGETS, longest: int = 128
) -> dict[str, dict[str, float]]:
    """Mean acceptance length per set: `{set: {"chain": …, "8": …, …, "rounds": chain rounds}}`.

    Rounds start at the first `longest` answer tokens. `model` takes unscaled features.
    """
    sums: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for sample in samples:
        starts = min(len(sample.tokens) - sample.prompt_length - 1, longest)
        if starts < 1:
            continue
        rounds = _Rounds(model, target, sample, starts, budgets)
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


class _Rounds:
    """Drafts at every start of one sample at once; trees are grown only for the rounds that are walked."""

    def __init__(self, model: DFlashModel, target: Target, sample: Sample, starts: int, budgets: Sequence[int]) -> None:
        ids = torch.as_tensor(sample.tokens.astype("int64"), device=target.device)
        features = _features(target, ids, model.config.target_layer_ids)
        drafted = [
            _draft(model, target, ids, features, range(a, min(a + BLOCKS_AT_ONCE, sample.prompt_length + starts)))
            for a in range(sample.prompt_length, sample.prompt_length + starts, BLOCKS_AT_ONCE)
        ]
        logprobs, rank = (torch.cat(parts) for parts in zip(*drafted, strict=True))
        self.logprobs, self.rank, self.budgets = logprobs.tolist(), rank.tolist(), budgets
        self.trees: dict[int, dict[int, int]] = {}

    def accepted(self, at: int, column: str) -> int:
        """Draft tokens that the round whose bonus is answer token `at` accepts."""
        if column == "chain":
            return next((d for d, r in enumerate(self.rank[at]) if r), len(self.rank[at]))
        if at not in self.trees:
            self.trees[at] = nested_depths(self.logprobs[at], self.rank[at], self.budgets)
        return self.trees[at][int(column)]


def _draft(model: DFlashModel, target: Target, ids: Tensor, features: Tensor, anchors: range) -> tuple[Tensor, Tensor]:
    """ids `[T]` → log-probabilities `[A, L, K]` descending and the rank `[A, L]` of the text's token in them (K: none)."""
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
    logits = F.linear(hidden[0].unflatten(0, at.shape)[:, 1:], target.head).float()
    top, index = logits.log_softmax(-1).topk(min(CANDIDATES, logits.shape[-1]), -1)
    inside = at[:, 1:] < len(ids)
    wanted = torch.where(inside, ids[at[:, 1:].clamp(max=len(ids) - 1)], -1)
    found = index == wanted[:, :, None]
    return top, torch.where(found.any(-1), found.int().argmax(-1), top.shape[-1])


def _features(target: Target, ids: Tensor, layer_ids: tuple[int, ...]) -> Tensor:
    mask = DocumentMask(1, len(ids), ids.device)
    positions = torch.arange(len(ids), device=ids.device)[None]
    return target.observe(ids[None], positions, layer_ids, mask.dense())[0]
