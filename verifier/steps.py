"""What a step does around a model's forward, whatever runs the model: commit, forward, draw. Knows no model."""

from __future__ import annotations

import logging
import time
from typing import Protocol

import torch
from torch import Tensor

from ddtree.kernels import Rows
from ddtree.kernels.waiting import WaitsForDevice
from ddtree.verifier.batch import VerifyBatch, VerifyResult
from ddtree.verifier.graphs import GraphedForward, StepSizes
from ddtree.verifier.noise import KeyedNoise
from ddtree.verifier.pool import Pool
from ddtree.verifier.sampling import all_greedy, sample
from ddtree.verifier.transfer import to_device

log = logging.getLogger(__name__)


class Model(Protocol):
    """The part of a step that a backend brings. Every rank of a group has one."""

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Writes the rows' K/V to their slots and attends.

        Args:
            tokens, positions: [T] int32.
            slots: [T] int64, page * page_size + offset.
        Returns: hidden [T, d] after the final norm, features [T, F] of the feature layers side by side.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[M, V] of hidden [M, d]; None on a rank that does not draw."""
        ...


class Steps:
    """Runs a model's steps on one device."""

    def __init__(self, model: Model, pool: Pool, vocab_size: int, graphs: StepSizes | None = None) -> None:
        """`graphs`: record CUDA graphs for steps up to this size where the model's dtype and head size have kernels; the
        pool's last page is then for padding rows, and no sequence may hold it."""
        self._model, self._pool, self._device = model, pool, pool.device
        self._noise = KeyedNoise(vocab_size, self._device)
        self._graphs: GraphedForward | None = None
        if graphs is not None:
            spare = (pool.pages - 1) * pool.page_size
            try:
                self._graphs = GraphedForward(
                    model.forward, graphs, page_size=pool.page_size, spare_slot=spare, device=self._device
                )
            except WaitsForDevice as error:
                log.warning("steps run without CUDA graphs: no kernel serves this dtype or head size (%s)", error)

    def run(self, batch: VerifyBatch) -> VerifyResult:
        """One step, complete when this returns; see `Target.step`. Call it in inference mode.

        Raises ValueError where a batch contradicts itself or the pool; nothing has happened then.
        """
        batch.check(self._pool.page_size)
        greedy = all_greedy(batch.sampling)  # before its tensors are out of the host's sight
        started = time.perf_counter()
        batch = to_device(batch, self._device)
        if batch.commit is not None:
            self._pool.commit(batch.commit)
        committed = time.perf_counter()
        if self._graphs and self._graphs.holds(batch):
            hidden, features = self._graphs.run(batch)
            features = features.clone()
        else:
            hidden, features = self._model.forward(batch.tokens, batch.positions, batch.slots, batch.rows)
        y = self._draw(hidden, batch, greedy)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        verified = time.perf_counter()
        return VerifyResult(y, features, {"commit": committed - started, "verify": verified - committed})

    def _draw(self, hidden: Tensor, batch: VerifyBatch, greedy: bool) -> Tensor:
        wanted = batch.sampling.row.long()
        logits = self._model.logits(hidden[wanted]) if len(wanted) else None
        if logits is None:
            return torch.empty(0, dtype=torch.int32, device=self._device)
        return sample(logits, batch.positions[wanted] + 1, batch.sampling, self._noise, greedy=greedy)
