"""What a step does around a model's forward, whatever runs the model: commit, forward, draw. Knows no model."""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor

from ddtree.kernels.waiting import WaitsForDevice
from ddtree.verifier.batch import VerifyBatch, VerifyResult
from ddtree.verifier.graphs import GraphedSteps, Output, StepSizes
from ddtree.verifier.model import Model
from ddtree.verifier.noise import KeyedNoise
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
            spare = (pool.pages - 1) * pool.page_size
            try:
                self._graphs = GraphedSteps(
                    model,
                    graphs,
                    page_size=pool.page_size,
                    spare_slot=spare,
                    vocab_size=vocab_size,
                    device=self._device,
                )
            except WaitsForDevice as error:
                log.warning("steps run without CUDA graphs: no kernel serves this dtype or head size (%s)", error)

    def run(self, batch: VerifyBatch) -> VerifyResult:
        """One step, complete when this returns; see `Target.step`. Call it in inference mode.

        Raises ValueError where a batch contradicts itself or the pool; nothing has happened then.
        """
        batch.check(self._pool.page_size)
        started = time.perf_counter()
        if batch.commit is not None:
            self._pool.commit(to_device(batch.commit, self._device))
        committed = time.perf_counter()
        if self._graphs and self._graphs.holds(batch):
            output = self._graphs.run(batch)
            features = output.features.clone()
        else:
            there = to_device((batch.tokens, batch.positions, batch.slots, batch.rows), self._device)
            hidden, features = self._model.forward(*there)
            output = Output(hidden, features)
        y = self._draw(output, batch)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        verified = time.perf_counter()
        return VerifyResult(y, features, {"commit": committed - started, "verify": verified - committed})

    def _draw(self, output: Output, batch: VerifyBatch) -> Tensor:
        wanted = batch.sampling.row
        count = len(wanted)
        if not count:
            return torch.empty(0, dtype=torch.int32, device=self._device)
        everywhere = count == len(output.hidden) and torch.equal(wanted, torch.arange(count, device=wanted.device))
        certain = all_greedy(batch.sampling)  # the host knows, unless the batch came on the device
        if everywhere and certain and output.greedy is not None:
            return output.greedy.clone()
        sampling, positions = to_device((batch.sampling, batch.positions), self._device)
        rows = sampling.row.long()
        logits = output.logits if everywhere and output.scored else self._model.logits(output.hidden[rows])
        if logits is None:  # another rank draws
            return torch.empty(0, dtype=torch.int32, device=self._device)
        return greedy(logits) if certain else sample(logits, positions[rows] + 1, sampling, self._noise)
