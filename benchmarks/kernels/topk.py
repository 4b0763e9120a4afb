"""topk_logprobs against torch's logsumexp + topk, over the vocabulary of Kimi K2."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ddtree.kernels import reference, topk_logprobs

from . import peers as p
from .measure import Contender, input_sets
from .peers import Peers
from .report import Report

SECTION = "topk_logprobs"
VOCAB, WIDTH = 163_840, 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def run(report: Report, peers: Peers) -> None:
    for rows in (15,) if report.quick else (15, 480):
        for name, dtype in DTYPES.items():
            _case(report, peers, rows, name, dtype)
    report.remarks.append(
        "topk_logprobs: torch's logsumexp runs in the logits' own dtype, the faster way. sglang's fast_topk is compiled for "
        "2048 float32 candidates and gives indices alone, so it stands here as a selection, not as the same operation."
    )


def _case(report: Report, peers: Peers, rows: int, name: str, dtype: torch.dtype) -> None:
    sets = input_sets(rows * VOCAB * dtype.itemsize)
    logits = [3 * torch.randn(rows, VOCAB, device="cuda").to(dtype) for _ in range(sets)]
    contenders = [
        Contender("ddtree", [partial(topk_logprobs, x, WIDTH) for x in logits], partial(_check, logits[-1])),
        Contender("torch", [partial(_torch, x) for x in logits]),
    ]
    if peers.common and dtype is torch.float32:
        indices = torch.empty(rows, 2048, dtype=torch.int32, device="cuda")
        lengths = torch.full((rows,), VOCAB, dtype=torch.int32, device="cuda")
        calls = [partial(p.fast_topk, x, indices, lengths) for x in logits]
        contenders.append(Contender("sglang fast_topk, 2048 indices", calls))
    us = report.compare(SECTION, {"rows": rows, "dtype": name}, contenders, bytes=logits[0].nbytes)
    ours = us.get("ddtree")
    ratio = us["torch"] / ours if ours else None
    report.bar(f"topk_logprobs, {rows} rows {name}, over torch", ratio, at_least=5, unit="×")
    if rows == 480:
        share = logits[0].nbytes / ours / 1e3 / report.rates.copy if ours else None
        report.bar(f"topk_logprobs, {rows} rows {name}, share of the copy rate", share, at_least=0.6)


def _torch(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.topk(WIDTH)
    return values.float() - logits.logsumexp(-1, keepdim=True).float(), ids


def _check(logits: Tensor) -> None:
    logits = logits[:16]
    (values, ids), (wanted, wanted_ids) = topk_logprobs(logits, WIDTH), reference.topk_logprobs(logits.cpu(), WIDTH)
    assert torch.equal(ids.cpu(), wanted_ids), "other candidates than the reference's"
    torch.testing.assert_close(values.cpu(), wanted, atol=2e-5, rtol=1e-5)
