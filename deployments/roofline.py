"""How long a round takes at best: what a GPU must read and multiply, at the rates it was seen to reach. Prints nothing.

A round runs one part after the other, and a part takes the longer of its bytes and its FLOP. Left out: what kernels stay
below these rates (ours reach 0.7 to 0.85 of the matmul rate in large attention), launches, norms and rotary, sampling,
building and accepting a tree (some 20 µs), prompts, waiting. So a time here is a floor, and a speed-up an expectation
only as far as both kinds of round miss their floors alike.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddtree.deployments.gpus import Gpu
from ddtree.deployments.sizing import DTYPE_BYTES, Drafter
from ddtree.deployments.target_shape import TargetShape

# Assumed until measured: one small all-reduce among the GPUs of a host. NCCL's floor on eight H200s is 2.3 µs (NCCL issue 1940).
ALL_REDUCE_S = 8e-6
# Control messages of a round, measured: a compiled graph over three actors and back on a 16-core host with an H200, 0.7–0.9 ms.
MESSAGES_S = 0.8e-3

BATCHES = (1, 8, 32)
CONTEXTS = (4096, 32768)


@dataclass(frozen=True)
class Step:
    """One round of a batch, seconds by part."""

    draft: float  # the drafter's layers, fusion and lm_head
    draft_attention: float
    matrices: float  # the target's matrices that every row meets, lm_head included
    experts: float  # the routed ones
    attention: float
    all_reduce: float
    messages: float

    @property
    def seconds(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Point:
    """Plain and speculative rounds at one load."""

    batch: int
    context: int  # tokens of every sequence
    rows: int  # of the speculative step
    distinct_experts: tuple[float, float] | None  # expected in a layer, plain and speculative
    fits: bool  # in the KV pool
    plain: Step
    speculative: Step
    acceptance_length: float

    @property
    def break_even(self) -> float:
        """Acceptance length from which speculation pays."""
        return self.speculative.seconds / self.plain.seconds

    @property
    def speedup(self) -> float:
        return self.acceptance_length / self.break_even

    @property
    def tokens_per_s(self) -> float:
        """Of the whole batch, speculative."""
        return self.batch * self.acceptance_length / self.speculative.seconds


@dataclass(frozen=True)
class Roofline:
    """The rates and sizes that rounds are computed from."""

    gpu: Gpu
    target: TargetShape
    ranks: int
    dtype: str
    drafter: Drafter | None
    block: int  # rows of a draft for one sequence
    windows: tuple[int | None, ...]  # tokens that each of the drafter's layers sees at most; None: all
    messages: float = MESSAGES_S

    def point(self, batch: int, context: int, budget: int, acceptance_length: float, kv_tokens: int) -> Point:
        """Both kinds of round for `batch` sequences of `context` tokens with trees of `budget` nodes and a root."""
        rows, experts = batch * (budget + 1), self.target.experts
        return Point(
            batch=batch,
            context=context,
            rows=rows,
            distinct_experts=(experts.expected_distinct(batch), experts.expected_distinct(rows)) if experts else None,
            fits=batch * (context + budget + 1) <= kv_tokens,
            plain=self.step(batch, batch, context, accepted=0),
            speculative=self.step(batch, rows, context, accepted=acceptance_length),
            acceptance_length=acceptance_length,
        )

    def step(self, batch: int, rows: int, context: int, accepted: float) -> Step:
        """A round of `batch` sequences with `rows` rows in all, drafted for where `accepted` is not 0."""
        gpu, target, ranks, width = self.gpu, self.target, self.ranks, DTYPE_BYTES[self.dtype]
        matrices = [0.0, 0.0]  # bytes, FLOP
        experts = [0.0, 0.0]
        for tensor in target.tensors():
            held, each = tensor.on_rank(ranks), target.bytes_per_weight(tensor, width)
            if tensor.part == "experts" and target.experts:
                moe = target.experts
                experts[0] += held * each * moe.expected_distinct(rows) / moe.count
                experts[1] += 2 * rows * held * moe.per_token / moe.count
            elif tensor.part != "embedding":
                matrices[0] += held * each
                matrices[1] += 2 * rows * held
        if target.tied:  # the embedding is the lm_head
            matrices[0] += target.vocab * target.hidden * width / ranks
            matrices[1] += 2 * rows * target.vocab * target.hidden / ranks
        kv = batch * context * target.attention.kv_width(ranks) * target.layers * width
        scores = rows * context * target.attention.flop(ranks) * target.layers
        draft, draft_attention = self._draft(batch, context, accepted)
        return Step(
            draft=draft,
            draft_attention=draft_attention,
            matrices=self._time(*matrices),
            experts=self._time(*experts),
            attention=self._time(kv, scores),
            all_reduce=self._all_reduces(rows * target.hidden * width, gpu),
            messages=self.messages,
        )

    def _time(self, read: float, flop: float) -> float:
        return max(read / self.gpu.bandwidth, flop / self.gpu.matmul)

    def _all_reduces(self, amount: float, gpu: Gpu) -> float:
        """Two a layer and one after the embedding: latency, and the bytes that a ring moves."""
        if self.ranks == 1:
            return 0.0
        once = ALL_REDUCE_S + 2 * (self.ranks - 1) / self.ranks * amount / gpu.link
        return (2 * self.target.layers + 1) * once

    def _draft(self, batch: int, context: int, accepted: float) -> tuple[float, float]:
        """Block rows meet the layers and the lm_head, newly accepted rows the fusion; attention reads the context."""
        if not accepted or not self.drafter:
            return 0.0, 0.0
        drafter, rows = self.drafter, batch * self.block
        fusion = drafter.parameters - drafter.layer_parameters
        head = self.target.vocab * self.target.hidden
        flop = 2 * (rows * (drafter.layer_parameters + head) + batch * accepted * fusion)
        seen = sum(min(context, window or context) for window in self.windows) / len(self.windows)
        read = batch * seen * drafter.context_per_token
        return self._time(drafter.weights + drafter.lm_head, flop), self._time(read, 0)
