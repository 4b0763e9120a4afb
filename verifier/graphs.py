"""Steps as CUDA graphs: a forward is recorded once per number of rows and replayed with other contents.

A batch is written into buffers of fixed size, and padded. Padding rows belong to a last sequence that uses none of them:
attention gives them 0, and their K/V goes to the pool's last page, which belongs to nobody. Knows no model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.kernels import Rows
from ddtree.kernels.waiting import never_waiting
from ddtree.verifier.batch import VerifyBatch

log = logging.getLogger(__name__)

# tokens [T] int32, positions [T] int32, slots [T] int64, rows → hidden [T, d], features [T, F]
Forward = Callable[[Tensor, Tensor, Tensor, Rows], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class StepSizes:
    """The largest step that is to run as a graph. A larger one runs without."""

    sequences: int
    rows: int
    pages: int  # of the longest sequence
    words: int  # of ancestor bits per row


def row_buckets(most: int) -> list[int]:
    """1, 2, 4, 8, 12, 16, 24, 32, 48, … and `most`: at most half of a bucket more than the one below."""
    sizes = [1, 2, 4] + [n * 2**i for i in range(1, most.bit_length()) for n in (4, 6)]
    return [n for n in sizes if n < most] + [most]


class FixedBatch:
    """A step of fixed size in memory of its own, which `fill` overwrites."""

    def __init__(self, sizes: StepSizes, page_size: int, spare_slot: int, device: torch.device) -> None:
        """`spare_slot`: where padding rows write."""
        self._sizes, self._page_size, self._spare_slot = sizes, page_size, spare_slot
        sequences = sizes.sequences + 1  # the last one has the padding rows

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._tokens, self._positions = zeros(sizes.rows), zeros(sizes.rows)
        self._slots = torch.full((sizes.rows,), spare_slot, device=device)
        self._row_offsets, self._q_len, self._seq_len = zeros(sequences + 1), zeros(sequences), zeros(sequences)
        self._page_table, self._causal = zeros(sequences, sizes.pages), zeros(sequences, dtype=torch.bool)
        self._ancestors = zeros(sizes.rows, sizes.words)

    def holds(self, batch: VerifyBatch) -> bool:
        """Whether the batch fits."""
        rows, sizes = batch.rows, self._sizes
        return (
            0 < len(batch.tokens) <= sizes.rows
            and len(rows.q_len) <= sizes.sequences
            and rows.ancestors.shape[1] <= sizes.words
            and (rows.page_table.shape[1] <= sizes.pages)
        )

    def clear(self, rows: int) -> None:
        """Make it a step of `rows` padding rows and nothing else."""
        self._row_offsets.zero_()
        self._row_offsets[-1:].fill_(rows)
        self._q_len.zero_()
        self._slots[:rows].fill_(self._spare_slot)

    def first(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Rows]:
        """What a forward takes, over the first `rows` rows. Views: they show what was filled in last."""
        return (
            self._tokens[:rows],
            self._positions[:rows],
            self._slots[:rows],
            Rows(
                row_offsets=self._row_offsets,
                q_len=self._q_len,
                seq_len=self._seq_len,
                page_table=self._page_table,
                page_size=self._page_size,
                causal=self._causal,
                ancestors=self._ancestors[:rows],
            ),
        )

    def fill(self, batch: VerifyBatch, rows: int) -> None:
        """Write a batch that it holds, on the same device, padded to `rows` rows. Nothing waits for the device."""
        given, n, sequences = batch.rows, len(batch.tokens), len(batch.rows.q_len)
        self._row_offsets[sequences:].fill_(n)
        self._row_offsets[-1:].fill_(rows)
        self._q_len[sequences:].zero_()
        if n < rows:  # token and position of a padding row may be any that exist: those of an earlier step do
            self._slots[n:rows].fill_(self._spare_slot)
        words, pages = given.ancestors.shape[1], given.page_table.shape[1]
        if words < self._sizes.words:
            self._ancestors[:n, words:].zero_()
        for own, theirs in (
            (self._row_offsets[: sequences + 1], given.row_offsets),
            (self._q_len[:sequences], given.q_len),
            (self._seq_len[:sequences], given.seq_len),
            (self._page_table[:sequences, :pages], given.page_table),
            (self._causal[:sequences], given.causal),
            (self._ancestors[:n, :words], given.ancestors),
            (self._tokens[:n], batch.tokens),
            (self._positions[:n], batch.positions),
            (self._slots[:n], batch.slots),
        ):
            own.copy_(theirs)


class GraphedForward:
    """The graphs of one forward."""

    @torch.inference_mode()
    def __init__(
        self, forward: Forward, sizes: StepSizes, *, page_size: int, spare_slot: int, device: torch.device
    ) -> None:
        """Records them all, the largest first so that the others fit into its memory.

        Raises WaitsForDevice where the forward does so, as the reference attention does.
        """
        self._batch = FixedBatch(sizes, page_size, spare_slot, device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._buckets = row_buckets(sizes.rows)
        started, memory = time.perf_counter(), None
        for rows in reversed(self._buckets):
            self._batch.clear(rows)
            forward(*self._batch.first(rows))  # lazy set-up of libraries must not be recorded
            if memory is None:
                with never_waiting():
                    forward(*self._batch.first(rows))
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory):
                hidden, features = forward(*self._batch.first(rows))
            memory = memory or graph.pool()
            self._graphs[rows] = graph, hidden, features
        log.info("%d CUDA graphs recorded in %.1f s", len(self._graphs), time.perf_counter() - started)

    def holds(self, batch: VerifyBatch) -> bool:
        """Whether `run` can take this batch."""
        return self._batch.holds(batch)

    def run(self, batch: VerifyBatch) -> tuple[Tensor, Tensor]:
        """hidden [T, d] and features [T, F] of a batch on this device. The next call overwrites both."""
        n = len(batch.tokens)
        rows = next(size for size in self._buckets if size >= n)
        self._batch.fill(batch, rows)
        graph, hidden, features = self._graphs[rows]
        graph.replay()
        return hidden[:n], features[:n]
