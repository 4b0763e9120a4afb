"""A round as a whole: the operations in one graph, and their share of a step of a model of Kimi K2's size."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.kernels import kv_compact, reference, topk_logprobs, tree_accept, tree_build

from . import accept, build, compact, mla
from .data import LEVELS, PAGE, WIDTH, full, page_tables
from .measure import Contender
from .peers import Peers
from .report import Report

SECTION = "round in one graph"
VOCAB, BUDGET, SEQ_LEN = 163_840, 63, 1000
BATCHES = (1, 8, 32)

# Kimi K2 on eight GPUs, tensor-parallel: 61 layers, 64 heads, 384 experts of which each token reads 8, 4-bit weights.
LAYERS, HEADS, EXPERTS, EXPERTS_READ, WEIGHT_BYTES, GPUS = 61, 64, 384, 8, 594e9, 8
MOST_SHARE = 0.005


def run(report: Report, peers: Peers) -> None:
    for batch in BATCHES[:1] if report.quick else BATCHES:
        round_ = _Round(batch)
        contenders = [Contender("topk + build + accept + compact", [round_], round_.check)]
        report.compare(SECTION, {"budget": BUDGET, "batch": batch}, contenders)
    report.remarks.append(
        f"Round: {LEVELS} rows of {VOCAB:,} float32 logits a sequence to {WIDTH} candidates, a tree, a stand-in for the target "
        f"(arithmetic on each node's token), the accepted path, {LAYERS} layers compacted; no host in between."
    )


class _Round:
    """One round of `batch` sequences, its target replaced by arithmetic."""

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.logits = torch.randn(batch * LEVELS, VOCAB, device="cuda")
        pages, (self.table,) = page_tables(1, batch, SEQ_LEN + BUDGET + 1)
        self.cache = torch.zeros(LAYERS, pages, PAGE, 576, dtype=torch.bfloat16, device="cuda")
        self.root, self.seq_len, self.budget = full(batch, 7), full(batch, SEQ_LEN), full(batch, BUDGET)

    def __call__(self) -> tuple[Tensor, ...]:
        logprobs, ids = (x.view(self.batch, LEVELS, WIDTH) for x in topk_logprobs(self.logits, WIDTH))
        tree = tree_build(logprobs, ids, self.root, self.seq_len, self.budget, max_budget=BUDGET)
        path = tree_accept(stand_in(tree.tokens, tree.first_child), tree)
        kv_compact([self.cache], self.table, PAGE, self.seq_len, path.path, path.n_accepted)
        return tree.tokens, path.path, path.n_accepted, path.bonus

    def check(self) -> None:
        """A graph replayed on other logits gives what the reference gives for those."""
        self()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = self()
        self.logits.normal_()
        graph.replay()
        logprobs, ids = topk_logprobs(self.logits, WIDTH)
        shape = self.batch, LEVELS, WIDTH
        tree = reference.tree_build(
            logprobs.view(shape), ids.view(shape), self.root, self.seq_len, self.budget, max_budget=BUDGET
        )
        path = reference.tree_accept(stand_in(tree.tokens, tree.first_child), tree)
        for a, b in zip(got, (tree.tokens, path.path, path.n_accepted, path.bonus), strict=True):
            assert torch.equal(a, b), "the replayed round differs from the reference's"


def stand_in(tokens: Tensor, first_child: Tensor) -> Tensor:
    """A token for each node: its first child's where the node's own is not a multiple of 4, else another."""
    child = tokens.gather(1, first_child.clamp(min=0).long())
    agrees = (first_child >= 0) & (tokens % 4 != 0)
    return torch.where(agrees, child, tokens + 1)


def share(report: Report) -> None:
    """Needs the figures of build, accept, compact and mla; leaves out what was not measured."""
    for batch in (8,) if report.quick else (8, 32):
        attention = report.us(mla.SECTION, mla.HOPPER, heads=HEADS // GPUS, kv=32_768, batch=batch)
        parts = [
            report.us(build.SECTION, "ddtree", budget=BUDGET, batch=32),
            report.us(accept.SECTION, "ddtree", budget=BUDGET, batch=32),
            report.us(compact.SECTION, "ddtree", batch=batch),
        ]
        tokens = batch * mla.NODES
        read = 1 - (1 - EXPERTS_READ / EXPERTS) ** tokens  # of the experts, if tokens choose evenly
        weights = WEIGHT_BYTES / GPUS * read / report.rates.copy / 1e3
        value = None
        if attention is not None and None not in parts:
            step = LAYERS * attention + weights
            value = 100 * sum(part for part in parts if part is not None) / step
        name = f"build + accept + compact, batch {batch}, KV 32K, share of a Kimi-K2-sized step"
        report.bar(name, value, at_most=100 * MOST_SHARE, unit=" %")
    report.remarks.append(
        f"Kimi-K2-sized step on {GPUS} GPUs: {LAYERS} × the measured attention of {HEADS // GPUS} heads, plus "
        f"{WEIGHT_BYTES / 1e9:.0f} GB of 4-bit weights, taken as experts only, of which those that the step's tokens choose "
        "(evenly) are read once at the copy rate. Nothing else counts, so the real step is longer and the share smaller. Build "
        "and accept are those of batch 32."
    )
