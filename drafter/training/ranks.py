"""The processes of one run, as torchrun starts them, one for each GPU. Knows no training.

What decides what is computed next (time, files that exist) is the first one's, so that all meet in the same collectives.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

PATIENCE = timedelta(days=7)  # the others wait while the first makes prompts or measures


@dataclass(frozen=True)
class Ranks:
    """This process among `count`; alone by default, where everything here does nothing."""

    rank: int = 0
    count: int = 1

    @classmethod
    def join(cls) -> Ranks:
        """As the environment that torchrun makes says; on a GPU each process takes its own."""
        rank, count = (int(os.environ.get(name, usual)) for name, usual in (("RANK", "0"), ("WORLD_SIZE", "1")))
        if count > 1 and not dist.is_initialized():
            on_gpus = torch.cuda.is_available()
            if on_gpus:
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo", timeout=PATIENCE)
            atexit.register(dist.destroy_process_group)
        return cls(rank, count) if count > 1 else ALONE

    @property
    def leads(self) -> bool:
        """Whether this one writes files and reports."""
        return self.rank == 0

    @property
    def part(self) -> slice:
        """This one's of what all share."""
        return slice(self.rank, None, self.count)

    def sum_(self, tensor: Tensor) -> Tensor:
        """In place, over all."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_all_(self, tensors: Sequence[Tensor]) -> None:
        """Of one dtype and device, in place, in one message."""
        if self.count > 1:
            whole = self.sum_(torch.cat([tensor.flatten() for tensor in tensors]))
            for tensor, part in zip(tensors, whole.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def copy_(self, tensors: Sequence[Tensor]) -> None:
        """The first one's, in place."""
        if self.count > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0)

    def first(self, *values: float) -> list[float]:
        """The first one's values."""
        told = torch.tensor(values, dtype=torch.float64)
        if self.count > 1:
            dist.broadcast(told, 0)
        return told.tolist()

    def wait(self) -> None:
        """Until all are here."""
        self.sum_(torch.zeros(1))


ALONE = Ranks()
