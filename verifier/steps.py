"""What a step does around a model's forward, whatever runs the model: commit, forward, draw. Knows no model."""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor

from ddtree.kernels.clock import DeviceClock
from ddtree.kernels.noise import KeyedNoise
from ddtree.kernels.waiting import WaitsForDevice
from ddtree.verifier.batch import LogprobRows, Logprobs, VerifyBatch, VerifyResult
from ddtree.verifier.edits import edit
from ddtree.verifier.graphs import LOGITS, GraphedSteps, Output, StepSizes
from ddtree.verifier.logprobs import joined, logprobs
from ddtree.verifier.masks import mask
from ddtree.verifier.model import Model
from ddtree.verifier.pool import Pool
from ddtree.verifier.sampling import all_greedy, greedy, sample
from ddtree.verifier.transfer import to_device, to_host

log = logging.getLogger(__name__)


class Steps:
    """Runs a model's steps on one device."""

    def __init__(self, model: Model, pool: Pool, vocab_size: int, graphs: StepSizes | None = None) -> None:
        """`graphs`: record CUDA graphs for steps up to this size where the model's dtype and head size have kernels; the
        pool's last page is then for padding rows, and no sequence may hold it."""
        self._model, self._pool, self._device = model, pool, pool.device
        self._noise = KeyedNoise(vocab_size, self._device)
        self._block = max(1, LOGITS // vocab_size)  # rows whose log-probabilities are taken at once
        self.clock = DeviceClock(self._device)  # of forwards and draws
        self._graphs: GraphedSteps | None = None
        if graphs is not None:
            try:
                self._graphs = GraphedSteps(model, pool, graphs, vocab_size)
            except WaitsForDevice as error:
                log.warning("steps run without CUDA graphs: no kernel serves this dtype or head size (%s)", error)
        if self._device.type == "cuda":
            one = torch.zeros(1, dtype=torch.int64, device=self._device)
            self._noise.rows(one, one)  # compiled now, not when somebody waits for a token

    @torch.inference_mode()
    def prepare(self, batch: VerifyBatch) -> None:
        """See Target.prepare."""
        if self._graphs and self._graphs.holds(batch):
            self._graphs.prepare(batch)

    def run(self, batch: VerifyBatch) -> VerifyResult:
        """One step; see `Target.step`. Call it in inference mode.

        Raises ValueError where a batch contradicts itself or the pool; nothing has happened then.
        """
        batch.check(self._pool.page_size)
        commit_seconds = 0.0
        graphs = self._graphs if self._graphs and self._graphs.holds(batch) else None
        if graphs:
            graphs.prepare(batch)
        else:
            if batch.commit is not None:
                began = time.perf_counter()
                self._pool.commit(to_device(batch.commit, self._device))
                commit_seconds = time.perf_counter() - began
            there = to_device((batch.tokens, batch.positions, batch.slots, batch.rows), self._device)
        with self.clock:
            output = graphs.run(batch) if graphs else Output(*self._model.forward(*there))
            y, drawn, logits = self._draw(output, batch)
        found = None if batch.logprobs is None else self._logprobs(batch.logprobs, output, logits, y)
        return VerifyResult(y, drawn, output.features, commit_seconds, found)

    def _draw(self, output: Output, batch: VerifyBatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """y [M], the same on the host, and the model's logits [M, V]."""
        as_given = batch.sampling is batch.edits is batch.masks is None
        if as_given and output.greedy is not None and output.drawn is not None:
            return output.greedy, output.drawn, output.logits
        y, logits = self._sampled(output, batch)
        return y, to_host(y), logits

    def _sampled(self, output: Output, batch: VerifyBatch) -> tuple[Tensor, Tensor | None]:
        """y [M] and the model's logits [M, V]; no y and None where another rank draws."""
        nothing = torch.empty(0, dtype=torch.int32, device=self._device)
        if batch.sampling is None:
            logits = output.logits if output.scored else self._model.logits(output.hidden)
            return (nothing, None) if logits is None else (greedy(self._edited(logits, batch)), logits)
        wanted = batch.sampling.row
        if not len(wanted):
            return nothing, None
        certain = all_greedy(batch.sampling)  # the host knows, unless the batch came on the device
        everywhere = len(wanted) == len(output.hidden) and torch.equal(wanted, torch.arange(len(wanted)).to(wanted))
        sampling, positions = to_device((batch.sampling, batch.positions), self._device)
        rows = sampling.row.long()
        logits = output.logits if everywhere and output.scored else self._model.logits(output.hidden[rows])
        if logits is None:
            return nothing, None
        edited = self._edited(logits, batch)
        y = greedy(edited) if certain else sample(edited, positions[rows] + 1, sampling, self._noise)
        return y, logits

    def _edited(self, logits: Tensor, batch: VerifyBatch) -> Tensor:
        """The logits [M, V] after `batch.edits` and `batch.masks`."""
        if batch.logprobs is not None and not (batch.edits is batch.masks is None):
            logits = logits.clone()  # log-probabilities are of the logits before
        if batch.edits is not None:
            logits = self._edit(logits, batch)
        if batch.masks is not None:
            logits = mask(logits, to_device(batch.masks, self._device), bans=batch.edits is not None)
        return logits

    def _edit(self, logits: Tensor, batch: VerifyBatch) -> Tensor:
        wanted = None if batch.sampling is None else batch.sampling.row
        needed = (batch.edits, batch.positions, batch.tokens, batch.rows.ancestors, wanted)
        edits, positions, tokens, ancestors, wanted = to_device(needed, self._device)
        assert edits is not None
        rows = slice(None) if wanted is None else wanted.long()
        return edit(logits, positions[rows] + 1, tokens, ancestors[rows], edits)

    def _logprobs(self, wanted: LogprobRows, output: Output, logits: Tensor | None, y: Tensor) -> Logprobs | None:
        """On the host. `logits` [M, V] and y [M] as drawn; None on a rank that does not draw."""
        wanted = to_device(wanted, self._device)
        parts = []
        for begin in range(0, len(wanted.drawn), self._block):
            if logits is not None:
                at = wanted.drawn[begin : begin + self._block].long()
                parts.append(logprobs(logits[at], y[at], wanted.top))
        for begin in range(0, len(wanted.row), self._block):
            part = slice(begin, begin + self._block)
            of_prompt = self._logits_at(wanted.row[part].long(), output)  # on every rank, which compute it together
            if of_prompt is not None:
                parts.append(logprobs(of_prompt, wanted.token[part], wanted.top))
        return to_host(joined(parts)) if parts else None

    def _logits_at(self, rows: Tensor, output: Output) -> Tensor | None:
        """[len(rows), V] of rows [n] of the batch; None on a rank that does not draw."""
        if output.scored:
            return None if output.logits is None else output.logits[rows]
        return self._model.logits(output.hidden[rows])
