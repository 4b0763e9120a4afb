"""What the router needs of a target, whatever runs it. Knows no backend."""

from __future__ import annotations

from typing import Protocol

from ddtree.verifier.batch import VerifyBatch, VerifyResult
from ddtree.verifier.model_dir import TargetInfo
from ddtree.verifier.pool import Pool


class Target(Protocol):
    """A loaded target model with its KV pool."""

    @property
    def info(self) -> TargetInfo: ...

    @property
    def pool(self) -> Pool: ...

    @property
    def compute_seconds(self) -> float:
        """What its device has computed in steps so far."""
        ...

    def prepare(self, batch: VerifyBatch) -> None:
        """A batch that `step` will get next, unless another comes: what is not on the target's device is there already, the
        tensors on it are still to be written to. Changes nothing that a step leaves."""
        ...

    def step(self, batch: VerifyBatch) -> VerifyResult:
        """Commit `batch.commit`, write the rows' K/V to their slots, score all rows, draw at the wanted ones.

        Every backend draws the same token for the same (seed, position, logits, sampling parameters), so a result does
        not depend on what else is in the batch beyond the rounding of the logits.
        """
        ...
