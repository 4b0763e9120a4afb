"""What a step does around a model's forward, whatever runs the model: commit, forward, draw. Knows no model."""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor

from ddtree.kernels.noise import KeyedNoise
from ddtree.kernels.waiting import WaitsForDevice
from ddtree.verifier.batch import VerifyBatch, VerifyResult
from ddtree.verifier.edits import edit
from ddtree.verifier.graphs import GraphedSteps, Output, StepSizes
from ddtree.verifier.model import Model
from ddtree.verifier.pool import Pool
from ddtree.verifier.sampling import all_greedy, greedy, sample
from ddtree.verifier.transfer import to_device

log = logging.getLogger(__name__)


class Steps:
    """Runs a model's steps on one device."""

    def __init__(self, model: Model, pool: Pool, vocab_size: int, graphs: StepSizes | None = None) -> None:
        """`graphs`: record CUDA graphs for steps up to this size where the model's dtype and head size have kernels; the
        pool's last page is then for padding rows, and no sequence may hold it."""
        self._model, self._pool, self._device = model, pool, pool.device
        self._noise = KeyedNoise(vocab_size, self._device)
        self._graphs: GraphedSteps | None = None
        if graphs is not None:
            try:
                self._graphs = GraphedSteps(model, pool, graphs, vocab_size)
            except WaitsForDevice as error:
                log.warning("steps run without CUDA graphs: no kernel serves this dtype or head size (%s)", error)

    def run(self, batch: VerifyBatch) -> VerifyResult:
        """One step; see `Target.step`. Call it in inference mode.

        Raises ValueError where a batch contradicts itself or the pool; nothing has happened then.
        """
        batch.check(self._pool.page_size)
        commit_seconds = 0.0
        if self._graphs and self._graphs.holds(batch):
            output = self._graphs.run(batch)
        else:
            if batch.commit is not None:
                began = time.perf_counter()
                self._pool.commit(to_device(batch.commit, self._device))
                commit_seconds = time.perf_counter() - began
            there = to_device((batch.tokens, batch.positions, batch.slots, batch.rows), self._device)
            output = Output(*self._model.forward(*there))
        y, drawn = self._draw(output, batch)
        return VerifyResult(y, drawn, output.features, commit_seconds)

    def _draw(self, output: Output, batch: VerifyBatch) -> tuple[Tensor, Tensor]:
        """y [M], and the same on the host."""
        if batch.sampling is batch.edits is None and output.greedy is not None and output.drawn is not None:
            return output.greedy, output.drawn
        y = self._sampled(output, batch)
        if y.device.type == "cpu":
            return y, y
        drawn = torch.empty(len(y), dtype=torch.int32, pin_memory=True)
        return y, drawn.copy_(y, non_blocking=True)

    def _sampled(self, output: Output, batch: VerifyBatch) -> Tensor:
        nothing = torch.empty(0, dtype=torch.int32, device=self._device)
        if batch.sampling is None:
            logits = output.logits if output.scored else self._model.logits(output.hidden)
            return nothing if logits is None else greedy(self._edited(logits, batch))  # None: another rank draws
        wanted = batch.sampling.row
        if not len(wanted):
            return nothing
        certain = all_greedy(batch.sampling)  # the host knows, unless the batch came on the device
        everywhere = len(wanted) == len(output.hidden) and torch.equal(wanted, torch.arange(len(wanted)).to(wanted))
        sampling, positions = to_device((batch.sampling, batch.positions), self._device)
        rows = sampling.row.long()
        logits = output.logits if everywhere and output.scored else self._model.logits(output.hidden[rows])
        if logits is None:
            return nothing
        logits = self._edited(logits, batch)
        return greedy(logits) if certain else sample(logits, positions[rows] + 1, sampling, self._noise)

    def _edited(self, logits: Tensor, batch: VerifyBatch) -> Tensor:
        """The logits [M, V] after `batch.edits`."""
        if batch.edits is None:
            return logits
        wanted = None if batch.sampling is None else batch.sampling.row
        needed = (batch.edits, batch.positions, batch.tokens, batch.rows.ancestors, wanted)
        edits, positions, tokens, ancestors, wanted = to_device(needed, self._device)
        rows = slice(None) if wanted is None else wanted.long()
        return edit(logits, positions[rows] + 1, tokens, ancestors[rows], edits)
