"""Steps as CUDA graphs: one is recorded per number of rows and replayed with other contents.

A batch is written into buffers of fixed size, and padded. Padding rows belong to a last sequence that uses none of them:
attention gives them 0, and their K/V goes to the pool's last page, which belongs to nobody. Knows no model.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ddtree.kernels import Rows
from ddtree.kernels.staging import Staging
from ddtree.kernels.waiting import never_waiting
from ddtree.verifier.batch import VerifyBatch
from ddtree.verifier.model import Model
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
                "causal": (torch.bool, (sequences,)),
            },
            device,
        )

    def holds(self, batch: VerifyBatch) -> bool:
        """Whether the batch fits."""
        rows, sizes = batch.rows, self._sizes
        return (
            0 < len(batch.tokens) <= sizes.rows
            and len(rows.q_len) <= sizes.sequences
            and rows.ancestors.shape[1] <= sizes.words
            and rows.page_table.shape[1] <= sizes.pages
        )

    def first(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Rows]:
        """What a forward takes, over the first `rows` rows. Views: they show what was filled in last."""
        inputs = self._inputs.device
        names = ("row_offsets", "q_len", "seq_len", "page_table", "causal")
        layout = Rows(
            **{name: inputs[name] for name in names}, page_size=self._page_size, ancestors=inputs["ancestors"][:rows]
        )
        return inputs["tokens"][:rows], inputs["positions"][:rows], inputs["slots"][:rows], layout

    def clear(self, rows: int) -> None:
        """Make it a step of `rows` padding rows and nothing else."""
        self._inputs.wait()
        self._pad(0, 0, rows)
        self._inputs.send()

    def fill(self, batch: VerifyBatch, rows: int) -> None:
        """Write a batch that it holds, padded to `rows` rows. Nothing waits for the device: what is on the host goes in one
        copy, what is on the device already is copied there."""
        self._inputs.wait()
        host, given = self._inputs.host, batch.rows
        n, sequences = len(batch.tokens), len(given.q_len)
        words, pages = given.ancestors.shape[1], given.page_table.shape[1]
        self._pad(n, sequences, rows)
        host["ancestors"][:n, words:] = 0
        there = []
        for name, tensor, part in (
            ("row_offsets", given.row_offsets, np.s_[: sequences + 1]),
            ("q_len", given.q_len, np.s_[:sequences]),
            ("seq_len", given.seq_len, np.s_[:sequences]),
            ("page_table", given.page_table, np.s_[:sequences, :pages]),
            ("causal", given.causal, np.s_[:sequences]),
            ("ancestors", given.ancestors, np.s_[:n, :words]),
            ("tokens", batch.tokens, np.s_[:n]),
            ("positions", batch.positions, np.s_[:n]),
            ("slots", batch.slots, np.s_[:n]),
        ):
            if tensor.device.type == "cpu":
                host[name][part] = tensor.numpy()
            else:
                there.append((self._inputs.device[name][part], tensor))
        self._inputs.send()
        for own, tensor in there:
            own.copy_(tensor)

    def _pad(self, n: int, sequences: int, rows: int) -> None:
        """All but the first n rows and sequences. Token and position of a padding row may be any that exist."""
        host = self._inputs.host
        host["slots"][n:rows] = self._spare_slot
        host["row_offsets"][sequences:] = n
        host["row_offsets"][-1] = rows
        host["q_len"][sequences:] = 0


@dataclass(frozen=True)
class Output:
    """What a forward leaves of a step's rows; what a graph leaves is there until the next one runs."""

    hidden: Tensor  # [T, d]
    features: Tensor  # [T, F]
    scored: bool = False  # all rows have their logits, here or on the rank that draws
    logits: Tensor | None = None  # [T, V]
    greedy: Tensor | None = None  # [T] int32, see `sampling.greedy`

    def first(self, rows: int) -> Output:
        parts = (None if x is None else x[:rows] for x in (self.logits, self.greedy))
        return Output(self.hidden[:rows], self.features[:rows], self.scored, *parts)


class GraphedSteps:
    """The graphs of one model's steps, tokens to logits."""

    @torch.inference_mode()
    def __init__(
        self, model: Model, sizes: StepSizes, *, page_size: int, spare_slot: int, vocab_size: int, device: torch.device
    ) -> None:
        """Records them all, the largest first so that the others fit into its memory.

        Raises WaitsForDevice where the forward does so, as the reference attention does.
        """
        self._model, self._logit_rows = model, LOGITS // vocab_size
        self._batch = FixedBatch(sizes, page_size, spare_slot, device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Output]] = {}
        self._buckets = row_buckets(sizes.rows)
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

    def run(self, batch: VerifyBatch) -> Output:
        """The step of a batch that it holds, its tensors on the host or this device. The next call overwrites the output."""
        n = len(batch.tokens)
        rows = next(size for size in self._buckets if size >= n)
        self._batch.fill(batch, rows)
        graph, output = self._graphs[rows]
        graph.replay()
        return output.first(n)

    def _step(self, rows: int) -> Output:
        hidden, features = self._model.forward(*self._batch.first(rows))
        if rows > self._logit_rows:
            return Output(hidden, features)
        logits = self._model.logits(hidden)
        return Output(hidden, features, True, logits, None if logits is None else greedy(logits))
