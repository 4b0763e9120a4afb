"""Steps as CUDA graphs, commit to drawn tokens: one is recorded per number of rows and replayed with other contents.

A batch is written into buffers of fixed size, and padded. Padding rows belong to a last sequence that uses none of them:
attention gives them 0, and their K/V goes to the pool's last page, which belongs to nobody. Padding paths are empty.
Knows no model.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddtree.kernels import Rows
from ddtree.kernels.staging import Staging
from ddtree.kernels.waiting import never_waiting
from ddtree.verifier.batch import Commit, VerifyBatch
from ddtree.verifier.model import Model
from ddtree.verifier.pool import Pool
from ddtree.verifier.sampling import greedy

log = logging.getLogger(__name__)
LOGITS = 1 << 26  # the most that a graph computes; beyond, and for rows that are not all wanted, they come after it


@dataclass(frozen=True)
class StepSizes:
    """The largest step that is to run as a graph. A larger one runs without."""

    sequences: int
    rows: int
    pages: int  # of the longest sequence
    words: int  # of ancestor bits per row
    path: int  # nodes of the longest accepted path, root included


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
        self._inputs = Staging(
            {
                "slots": (torch.int64, (sizes.rows,)),
                "tokens": (torch.int32, (sizes.rows,)),
                "positions": (torch.int32, (sizes.rows,)),
                "ancestors": (torch.int32, (sizes.rows, sizes.words)),
                "row_offsets": (torch.int32, (sequences + 1,)),
                "q_len": (torch.int32, (sequences,)),
                "seq_len": (torch.int32, (sequences,)),
                "page_table": (torch.int32, (sequences, sizes.pages)),
                "commit_lengths": (torch.int32, (sizes.sequences,)),
                "commit_counts": (torch.int32, (sizes.sequences,)),
                "commit_paths": (torch.int32, (sizes.sequences, sizes.path)),
                "commit_pages": (torch.int32, (sizes.sequences, sizes.pages)),
                "causal": (torch.bool, (sequences,)),
            },
            device,
        )

    def holds(self, batch: VerifyBatch) -> bool:
        """Whether the batch fits."""
        rows, commit, sizes = batch.rows, batch.commit, self._sizes
        return (
            0 < len(batch.tokens) <= sizes.rows
            and len(rows.q_len) <= sizes.sequences
            and rows.ancestors.shape[1] <= sizes.words
            and rows.page_table.shape[1] <= sizes.pages
            and (commit is None or _fits(commit.path, sizes.sequences, sizes.path))
            and (commit is None or _fits(commit.page_table, sizes.sequences, sizes.pages))
        )

    def first(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Rows]:
        """What a forward takes, over the first `rows` rows. Views: they show what was filled in last."""
        inputs = self._inputs.device
        names = ("row_offsets", "q_len", "seq_len", "page_table", "causal")
        layout = Rows(
            **{name: inputs[name] for name in names}, page_size=self._page_size, ancestors=inputs["ancestors"][:rows]
        )
        return inputs["tokens"][:rows], inputs["positions"][:rows], inputs["slots"][:rows], layout

    def commit(self) -> Commit:
        """The paths to commit; views, too."""
        inputs = self._inputs.device
        lengths, counts = inputs["commit_lengths"], inputs["commit_counts"]
        return Commit(inputs["commit_pages"], lengths, inputs["commit_paths"], counts)

    def clear(self, rows: int) -> None:
        """Make it a step of `rows` padding rows and nothing else."""
        self._inputs.wait()
        self._pad(0, 0, rows)
        self._inputs.send()

    def fill(self, batch: VerifyBatch, rows: int) -> list[tuple[Tensor, Tensor]]:
        """Write a batch that it holds, padded to `rows` rows, but for what is on the device already: that is to be copied
        there, into the first of each pair. What is on the host goes in one copy, and nothing waits for the device."""
        self._inputs.wait()
        host, given, commit = self._inputs.host, batch.rows, batch.commit
        n, sequences = len(batch.tokens), len(given.q_len)
        words, pages = given.ancestors.shape[1], given.page_table.shape[1]
        self._pad(n, sequences, rows)
        host["ancestors"][:n, words:] = 0
        fields: list[tuple[str, Tensor, Any]] = [
            ("row_offsets", given.row_offsets, np.s_[: sequences + 1]),
            ("q_len", given.q_len, np.s_[:sequences]),
            ("seq_len", given.seq_len, np.s_[:sequences]),
            ("page_table", given.page_table, np.s_[:sequences, :pages]),
            ("causal", given.causal, np.s_[:sequences]),
            ("ancestors", given.ancestors, np.s_[:n, :words]),
            ("tokens", batch.tokens, np.s_[:n]),
            ("positions", batch.positions, np.s_[:n]),
            ("slots", batch.slots, np.s_[:n]),
        ]
        if commit is not None:
            moved, deep, wide = len(commit.path), commit.path.shape[1], commit.page_table.shape[1]
            fields += [
                ("commit_lengths", commit.seq_len, np.s_[:moved]),
                ("commit_counts", commit.n_accepted, np.s_[:moved]),
                ("commit_paths", commit.path, np.s_[:moved, :deep]),
                ("commit_pages", commit.page_table, np.s_[:moved, :wide]),
            ]
        there = []
        for name, tensor, part in fields:
            if tensor.is_cuda:
                there.append((self._inputs.device[name][part], tensor))
            else:
                host[name][part] = tensor.numpy()
        self._inputs.send()
        return there

    def _pad(self, n: int, sequences: int, rows: int) -> None:
        """All but the first n rows and sequences. Token and position of a padding row may be any that exist."""
        host = self._inputs.host
        host["slots"][n:rows] = self._spare_slot
        host["row_offsets"][sequences:] = n
        host["row_offsets"][-1] = rows
        host["q_len"][sequences:] = 0
        host["commit_counts"][:] = 0


def _fits(tensor: Tensor, rows: int, columns: int) -> bool:
    return tensor.shape[0] <= rows and tensor.shape[1] <= columns


@dataclass(frozen=True)
class Output:
    """What a forward leaves of a step's rows; what a graph leaves is there until the next one runs."""

    hidden: Tensor  # [T, d]
    features: Tensor  # [T, F]
    scored: bool = False  # all rows have their logits, here or on the rank that draws
    logits: Tensor | None = None  # [T, V]
    greedy: Tensor | None = None  # [T] int32, see `sampling.greedy`
    drawn: Tensor | None = None  # the same in pinned memory of the host, when the device is done

    def first(self, rows: int) -> Output:
        parts = (None if x is None else x[:rows] for x in (self.logits, self.greedy, self.drawn))
        return Output(self.hidden[:rows], self.features[:rows], self.scored, *parts)


@dataclass(frozen=True)
class _Prepared:
    """A batch whose numbers are in place, but for those on the device."""

    batch: VerifyBatch
    rows: int  # of its graph
    there: list[tuple[Tensor, Tensor]]  # see FixedBatch.fill


class GraphedSteps:
    """The graphs of one model's steps."""

    @torch.inference_mode()
    def __init__(self, model: Model, pool: Pool, sizes: StepSizes, vocab_size: int) -> None:
        """Records them all, the largest first so that the others fit into its memory. The pool's last page is for padding.

        Raises WaitsForDevice where the forward does so, as the reference attention does.
        """
        self._model, self._pool, self._logit_rows = model, pool, LOGITS // vocab_size
        device, spare_slot = pool.device, (pool.pages - 1) * pool.page_size
        self._batch = FixedBatch(sizes, pool.page_size, spare_slot, device)
        self._drawn = torch.empty(sizes.rows, dtype=torch.int32, pin_memory=True)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Output]] = {}
        self._buckets = row_buckets(sizes.rows)
        self._prepared: _Prepared | None = None
        started, memory = time.perf_counter(), None
        for rows in reversed(self._buckets):
            self._batch.clear(rows)
            self._step(rows)  # lazy set-up of libraries must not be recorded
            if memory is None:
                with never_waiting():
                    self._step(rows)
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory):
                output = self._step(rows)
            memory = memory or graph.pool()
            self._graphs[rows] = graph, output
        log.info("%d CUDA graphs recorded in %.1f s", len(self._graphs), time.perf_counter() - started)

    def holds(self, batch: VerifyBatch) -> bool:
        """Whether `run` can take this batch."""
        return self._batch.holds(batch)

    def prepare(self, batch: VerifyBatch) -> _Prepared:
        """Write what is on the host of a batch that it holds, which will run next, unless that was done."""
        if self._prepared and self._prepared.batch is batch:
            return self._prepared
        rows = next(size for size in self._buckets if size >= len(batch.tokens))
        self._prepared = _Prepared(batch, rows, self._batch.fill(batch, rows))
        return self._prepared

    def run(self, batch: VerifyBatch) -> Output:
        """The step of a batch that it holds, its tensors on the host or this device. The next call overwrites the output."""
        prepared, self._prepared = self.prepare(batch), None
        for own, given in prepared.there:
            own.copy_(given)
        graph, output = self._graphs[prepared.rows]
        graph.replay()
        return output.first(len(batch.tokens))

    def _step(self, rows: int) -> Output:
        self._pool.commit(self._batch.commit())
        hidden, features = self._model.forward(*self._batch.first(rows))
        if rows > self._logit_rows:
            return Output(hidden, features)
        logits = self._model.logits(hidden)
        if logits is None:
            return Output(hidden, features, scored=True)
        y, drawn = greedy(logits), self._drawn[:rows]
        drawn.copy_(y, non_blocking=True)
        return Output(hidden, features, True, logits, y, drawn)
