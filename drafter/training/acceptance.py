"""What chain and best-first trees accept of the target's answers, offline and exact. Knows no training.

An answer does not depend on the drafter: it is greedy, or drawn with noise that seed and position determine. So a round that
begins at an answer token is: draft there, grow the tree, follow the answer while its next token is a child. Acceptance
length = accepted tokens + the bonus token.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree.drafter.dflash import DFlashModel
from ddtree.drafter.items import Candidates
from ddtree.drafter.noised import noised
from ddtree.drafter.path_head import PathHead
from ddtree.drafter.training.masks import AnchorMask, DocumentMask
from ddtree.drafter.training.ragged import Tokens
from ddtree.drafter.training.tallies import UNCUT, Cells, Tally, Trial, total
from ddtree.drafter.training.target import Target
from ddtree.kernels import tree_build_path

BUDGETS = (8, 16, 32, 63)
CANDIDATES = 64  # per slot: a tree of 63 nodes never needs more
BLOCKS_AT_ONCE = 64


@dataclass(frozen=True)
class Sample:
    """An answer to measure on."""

    name: str  # of its set: a row of the table
    tokens: Tokens  # prompt and answer
    prompt_length: int
    seed: int = 0  # of its draws, where it was sampled


@dataclass(frozen=True)
class Ranking:
    """How candidates of a slot are chosen."""

    top_k: int = CANDIDATES
    noise: float = 0.0  # times the target's Gumbel noise, added to their log-probabilities (share_noise); 0: none
    head: PathHead | None = None  # the drafter's, by which chains and trees are chosen then


def nested_depths(
    logprobs: Sequence[Sequence[float]],
    rank: Sequence[int],
    budgets: Sequence[int],
    tried: list[tuple[int, Trial]] | None = None,
) -> dict[int, int]:
    """Tokens that the best-first trees of each budget accept in one round.

    The B most likely prefixes under independent slots are nested in B, so one expansion serves all budgets (DDTree, algorithm 1).

    Args:
        logprobs: `[L][K]`, each row descending.
        rank: `[L]`, where the answer's token stands in its row; K or more: nowhere.
        budgets: numbers of tree nodes, the root not counted.
        tried: gets the trials, each with the smallest budget whose tree has its node.
    """
    slots, width = len(logprobs), len(logprobs[0])
    heap, depth, out = [(-logprobs[0][0], 0, 0, True)], 0, dict.fromkeys(budgets, -1)
    for nodes in range(1, max(budgets) + 1):
        if not heap:
            break
        cost, d, r, on_path = heapq.heappop(heap)
        hit = on_path and r == rank[d]
        depth = d + 1 if hit else depth
        if on_path and tried is not None:
            tried.append((nodes, (d, logprobs[d][r], hit)))
        if nodes in out:
            out[nodes] = depth
        if r + 1 < width:
            heapq.heappush(heap, (cost + logprobs[d][r] - logprobs[d][r + 1], d, r + 1, on_path))
        if d + 1 < slots:
            heapq.heappush(heap, (cost - logprobs[d + 1][0], d + 1, 0, hit))
    return {budget: depth if found < 0 else found for budget, found in out.items()}


def nested_path_depths(
    first: Tensor,
    conditional: Tensor,
    rank: Sequence[int],
    budgets: Sequence[int],
    tried: list[tuple[int, Trial]] | None = None,
) -> dict[int, int]:
    """`nested_depths` of the trees that `tree_build_path` grows, from first `[K]` and conditional `[L-1, K, K]`.

    Its nodes come in order, so the first B are the tree of budget B.
    """
    levels, (k,), most = len(rank), first.shape, max(budgets)
    candidates = torch.arange(k, dtype=torch.int32).expand(1, levels, k)  # stand for their tokens
    zero = torch.zeros(1, dtype=torch.int32)
    tree = tree_build_path(first[None], conditional[None], candidates, zero, zero, zero + most, max_budget=most)
    parents, tokens = tree.parent[0].tolist(), tree.tokens[0].tolist()
    path = [0]  # the answer's nodes
    for node in range(1, int(tree.n_nodes)):
        if parents[node] not in path:
            continue
        depth = path.index(parents[node])
        hit = tokens[node] == rank[depth]
        if tried is not None:
            row = conditional[depth - 1, rank[depth - 1]] if depth else first
            tried.append((node, (depth, float(row[tokens[node]]), hit)))
        if hit:
            path.append(node)
    return {budget: bisect_right(path, budget) - 1 for budget in budgets}


def measure(
    model: DFlashModel,
    target: Target,
    samples: Iterable[Sample],
    budgets: Sequence[int] = BUDGETS,
    longest: int = 128,
    ranking: Ranking = Ranking(),
) -> dict[str, dict[str, float]]:
    """Mean acceptance length per set: `{set: {"chain": …, "8": …, …, "rounds": chain rounds}}`.

    Rounds start at the first `longest` answer tokens. `model` takes unscaled features.
    """
    sums: dict[str, dict[str, Tally]] = {}
    for sample in samples:
        counted = tally(model, target, sample, budgets, longest, ranking=ranking)
        sums[sample.name] = total((sums.get(sample.name, {}), counted))
    return {
        name: {column: round(t.acceptance_length, 3) for column, t in columns.items()}
        | {"rounds": columns["chain"].rounds}
        for name, columns in sums.items()
        if columns
    }


@torch.no_grad()
def tally(
    model: DFlashModel,
    target: Target,
    sample: Sample,
    budgets: Sequence[int],
    longest: int,
    *,
    ranking: Ranking = Ranking(),
    cells: Cells = UNCUT,
) -> dict[str, Tally]:
    """The rounds of one answer, for the chain and the tree of each budget: `{"chain": …, "8": …, …}`; empty where it is too
    short for a round. See `measure`."""
    starts = min(len(sample.tokens) - sample.prompt_length - 1, longest)
    if starts < 1:
        return {}
    rounds = _Rounds(model, target, sample, starts, budgets, ranking)
    out = {}
    for column in ("chain", *map(str, budgets)):
        out[column] = counts = Tally.empty(model.config.horizon, cells)
        at = 0
        while at < starts:
            accepted, trials = rounds.play(at, column)
            counts.add(accepted, trials, known=len(sample.tokens) - sample.prompt_length - 1 - at)
            at += accepted + 1
    return out


class _Rounds:
    """Drafts at every start of one sample at once; trees are grown only for the rounds that are walked."""

    def __init__(
        self, model: DFlashModel, target: Target, sample: Sample, starts: int, budgets: Sequence[int], ranking: Ranking
    ) -> None:
        ids = torch.as_tensor(sample.tokens.astype("int64"), device=target.device)
        features = _features(target, ids, model.config.target_layer_ids)
        first, end = sample.prompt_length, sample.prompt_length + starts
        blocks = (range(a, min(a + BLOCKS_AT_ONCE, end)) for a in range(first, end, BLOCKS_AT_ONCE))
        drafted = [_draft(model, target, ids, features, anchors, ranking, sample.seed) for anchors in blocks]
        self.logprobs = torch.cat([part.logprobs for part, _ in drafted]).tolist()
        below = [part.conditional for part, _ in drafted if part.conditional is not None]
        self.conditional = torch.cat(below).cpu() if below else None
        self.rank, self.budgets = torch.cat([rank for _, rank in drafted]).tolist(), budgets
        self.trees: dict[int, tuple[dict[int, int], list[tuple[int, Trial]]]] = {}

    def play(self, at: int, column: str) -> tuple[int, list[Trial]]:
        """Draft tokens that the round whose bonus is answer token `at` accepts, and its trials."""
        logprobs, rank = self.logprobs[at], self.rank[at]
        if self.conditional is not None:
            return self._play_path(at, column, torch.tensor(logprobs[0]), self.conditional[at])
        if column == "chain":
            accepted = next((d for d, r in enumerate(rank) if r), len(rank))
            return accepted, [(d, logprobs[d][0], rank[d] == 0) for d in range(min(accepted + 1, len(rank)))]
        if at not in self.trees:
            tried: list[tuple[int, Trial]] = []
            self.trees[at] = nested_depths(logprobs, rank, self.budgets, tried), tried
        return self._of_tree(at, column)

    def _of_tree(self, at: int, column: str) -> tuple[int, list[Trial]]:
        depths, tried = self.trees[at]
        return depths[int(column)], [trial for nodes, trial in tried if nodes <= int(column)]

    def _play_path(self, at: int, column: str, first: Tensor, conditional: Tensor) -> tuple[int, list[Trial]]:
        """`play` where there is a path head: first `[K]`, conditional `[L-1, K, K]`."""
        rank, trials = self.rank[at], list[Trial]()
        if column != "chain":
            if at not in self.trees:
                tried: list[tuple[int, Trial]] = []
                self.trees[at] = nested_path_depths(first, conditional, rank, self.budgets, tried), tried
            return self._of_tree(at, column)
        row = first
        for depth, right in enumerate(rank):
            best = int(row.argmax())
            trials.append((depth, float(row[best]), best == right))
            if best != right:
                return depth, trials
            row = conditional[depth, best] if depth < len(conditional) else row
        return len(rank), trials


def _draft(
    model: DFlashModel, target: Target, ids: Tensor, features: Tensor, anchors: range, ranking: Ranking, seed: int
) -> tuple[Candidates, Tensor]:
    """ids `[T]` → candidates `[A, L, K]` and the rank `[A, L]` of the text's token in them (K: none)."""
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
    slots = hidden[0].unflatten(0, at.shape)[:, 1:].flatten(0, 1)  # as a batch, each block would copy the lm_head
    logits = F.linear(slots, target.head).float().unflatten(0, (len(anchor), -1))
    top, index = logits.log_softmax(-1).topk(min(ranking.top_k, logits.shape[-1]), -1)
    drafted = Candidates(top, index.int())
    if ranking.head:
        drafted = ranking.head.given_the_path(drafted, slots.unflatten(0, (len(anchor), -1)), ids[anchor])
    if ranking.noise:
        draws = torch.full_like(anchor, seed), anchor.int(), torch.full(anchor.shape, ranking.noise, device=device)
        drafted = noised(drafted, *draws)
    inside = at[:, 1:] < len(ids)
    wanted = torch.where(inside, ids[at[:, 1:].clamp(max=len(ids) - 1)], -1)
    found = drafted.ids == wanted[:, :, None]
    return drafted, torch.where(found.any(-1), found.int().argmax(-1), top.shape[-1])


def _features(target: Target, ids: Tensor, layer_ids: tuple[int, ...]) -> Tensor:
    mask = DocumentMask(1, len(ids), ids.device)
    positions = torch.arange(len(ids), device=ids.device)[None]
    return target.observe(ids[None], positions, layer_ids, mask.dense())[0]
