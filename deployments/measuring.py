"""What a verify step takes on this machine: a few steps of made-up sequences, timed. Knows batches, not what is in a model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from ddtree.deployments.batching import lay_out
from ddtree.deployments.costs import StepSize
from ddtree.deployments.requests import GenerationRequest
from ddtree.deployments.round_curve import size_of
from ddtree.deployments.round_loop import VerifierPeer
from ddtree.deployments.scheduler import Entry, Scheduler
from ddtree.deployments.sequence import Sequence
from ddtree.kernels import DraftTree, tree_build

RUNS = 2  # of each size, of which the faster counts
LONGEST_S = 0.4  # no larger step is tried after one that took so long
CONTEXT, CHUNK = 2048, 64  # KV rows of a long sequence, and rows that read them
NODES = 8  # of the trees that are tried


def measure(verifier: VerifierPeer, scheduler: Scheduler, largest: int) -> Iterator[tuple[StepSize, float]]:
    """Steps of up to `largest` rows and their seconds, for `StepCost.measured`. Their rows are written to the page that belongs
    to nobody, so the pool stays as it is. Raises PeerLost."""
    limits = scheduler.limits
    room = min(scheduler.pages.pages * scheduler.pages.page_size, limits.max_positions)  # of one sequence
    timed = _Timed(verifier, scheduler)
    timed.step([(0, 1)])  # whatever is made at the first step
    rows, seconds = 1, 0.0
    while rows <= min(largest, room) and seconds < LONGEST_S:
        size, seconds = timed.step([(0, rows)])
        yield size, seconds
        rows *= 2
    for sequences in {1, limits.max_sequences}:
        yield timed.step([(0, 1)] * sequences)
        yield timed.step([(0, 1 + NODES)] * sequences, trees=True)
    context = min(CONTEXT, room) - CHUNK
    if context > 0:
        yield timed.step([(context, 1)])
        yield timed.step([(context, CHUNK)])


class _Timed:
    def __init__(self, verifier: VerifierPeer, scheduler: Scheduler) -> None:
        self._verifier, self._pages = verifier, scheduler.pages

    def step(self, sequences: list[tuple[int, int]], *, trees: bool = False) -> tuple[StepSize, float]:
        """Of sequences with so many KV rows each, and rows to compute."""
        entries = [self._entry(computed, rows) for computed, rows in sequences]
        budgets = [rows - 1 for _, rows in sequences] if trees else []
        took = []
        for _ in range(RUNS):
            width = max(budgets, default=0) + 1
            layout = lay_out(entries, budgets, width, self._pages.page_size, self._pages.pages)
            laid = layout.batch(_chains(budgets) if trees else None)
            laid.gather()
            batch = replace(laid.batch, sampling=None)  # draw at every row, as for trees
            began = time.perf_counter()
            self._verifier.start(batch)
            self._verifier.result()
            took.append(time.perf_counter() - began)
        return size_of(entries, budgets), min(took)

    def _entry(self, computed: int, rows: int) -> Entry:
        sequence = Sequence(GenerationRequest("a step to be timed", (0,) * (computed + rows), 1), 0.0)
        sequence.computed, sequence.stored = computed, computed + rows
        sequence.pages = list(range(self._pages.pages_for(computed + rows)))
        return Entry(sequence, rows, 0, False)


def _chains(budgets: list[int]) -> DraftTree:
    """Trees of one path each."""
    shape = len(budgets), max(budgets), 1
    one = torch.zeros(len(budgets), dtype=torch.int32)
    budget = torch.tensor(budgets, dtype=torch.int32)
    return tree_build(torch.zeros(shape), torch.zeros(shape).int(), one, one, budget, max_budget=max(budgets))
