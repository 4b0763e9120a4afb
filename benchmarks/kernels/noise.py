"""share_noise against the same in torch."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ddtree.kernels import reference, share_noise

from .data import Candidates
from .measure import Contender
from .peers import Peers
from .report import Report

SECTION = "share_noise"
SETS = 4
BATCHES = (1, 32, 64)


def run(report: Report, _: Peers) -> None:
    for batch in BATCHES[:1] if report.quick else BATCHES:
        inputs = [_call(batch, seed) for seed in range(SETS)]
        contenders = [
            Contender("ddtree", [partial(share_noise, *given) for given in inputs], partial(_check, inputs[-1])),
            Contender("torch", [partial(reference.share_noise, *given) for given in inputs]),
        ]
        us = report.compare(SECTION, {"batch": batch}, contenders)
        if {"ddtree", "torch"} <= set(us):
            report.bar(f"share_noise, batch {batch}, over torch", us["torch"] / us["ddtree"], at_least=1, unit="×")


def _call(batch: int, seed: int) -> tuple[Tensor, ...]:
    drafted = Candidates.random(batch, seed)
    seeds = torch.arange(batch, device="cuda") + seed
    scale = torch.full((batch,), 0.65, device="cuda")
    return drafted.logprobs, drafted.ids, seeds, drafted.seq_len, scale


def _check(given: tuple[Tensor, ...]) -> None:
    (got, _), (wanted, _) = share_noise(*given), reference.share_noise(*given)
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-5)
