"""kv_compact of every layer of a Kimi-K2-sized latent cache, against the time that its bytes take at the copy rate."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ddtree.kernels import kv_compact, reference

from .data import PAGE, full, int32, page_tables
from .measure import Contender, input_sets
from .peers import Peers
from .report import Report

SECTION = "kv_compact"
LAYERS, ROW = 61, 576
PATH = [0, 2, 5, 9, 17, 30, 44, 60]  # every row but the root's moves
SEQ_LEN = 100


def run(report: Report, peers: Peers) -> None:
    for batch in (8,) if report.quick else (8, 32):
        moved = batch * (len(PATH) - 1) * LAYERS * ROW * 2 * 2  # read and written
        sets = input_sets(moved, most=16)
        pages, tables = page_tables(sets, batch, SEQ_LEN + 64)
        cache = torch.empty(LAYERS, pages, PAGE, ROW, dtype=torch.bfloat16, device="cuda").normal_()
        rest = full(batch, SEQ_LEN), int32(PATH).repeat(batch, 1), full(batch, len(PATH))
        calls = [partial(kv_compact, [cache], table, PAGE, *rest) for table in tables]
        contenders = [Contender("ddtree", calls, partial(_check, cache, tables[0], *rest))]
        us = report.compare(SECTION, {"batch": batch, "layers": LAYERS}, contenders, bytes=moved)
        ideal = moved / report.rates.copy / 1e3
        ours = us.get("ddtree")
        name = f"kv_compact, batch {batch}, time over {ideal:.2f} µs at the copy rate"
        report.bar(name, ours / ideal if ours else None, at_most=2, unit="×")
    report.remarks.append(
        f"kv_compact: {len(PATH) - 1} rows of {2 * ROW} bytes move in each of {LAYERS} layers of a sequence; a kernel that does "
        f"nothing takes {report.rates.launch:.2f} µs."
    )


def _check(cache: Tensor, table: Tensor, *rest: Tensor) -> None:
    wanted, got = cache[:2].clone(), cache[:2].clone()
    reference.kv_compact([wanted], table, PAGE, *rest)
    kv_compact([got], table, PAGE, *rest)
    assert torch.equal(got, wanted), "cache differs from the reference's"
