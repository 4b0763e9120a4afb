"""verify_attn in its grouped-query form against torch's flash attention without a mask, without pages."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ddtree.kernels import Rows, verify_attn

from .data import PAGE, Candidates, page_tables, see, slots_of, tree_rows
from .measure import Contender, input_sets
from .peers import Peers
from .report import Report

SECTION = "verify_attn"
NODES = 64
MODELS = {"Qwen3-8B": (32, 8, 128), "SmolLM2-135M": (9, 3, 64)}  # query heads, key heads, head size
CASES = ((4096, 1), (4096, 8), (32_768, 1), (32_768, 8))


def run(report: Report, peers: Peers) -> None:
    for model, (heads, kv_heads, dim) in MODELS.items():
        for kv, batch in CASES[:2] if report.quick else CASES:
            _case(report, {"model": model, "kv": kv, "batch": batch}, heads, kv_heads, dim)
    report.remarks.append(
        "verify_attn: torch's side is optimistic. It reads contiguous keys and values, and no mask, so it is not the operation."
    )


def _case(report: Report, case: dict, heads: int, kv_heads: int, dim: int) -> None:
    kv, batch = case["kv"], case["batch"]
    sets = input_sets(2 * batch * kv * kv_heads * dim * 2)
    pages, tables = page_tables(sets, batch, kv + NODES)
    k, v = (torch.empty(pages, PAGE, kv_heads, dim, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
    tree = Candidates.random(batch, seed=kv).tree(NODES - 1)
    q = torch.randn(batch * NODES, heads, dim, device="cuda").bfloat16()
    every_rows = [tree_rows(tree, kv, table) for table in tables]
    query = q.view(batch, NODES, heads, dim).transpose(1, 2).contiguous()
    dense = [
        [torch.randn(batch, kv_heads, kv + NODES, dim, device="cuda").bfloat16() for _ in range(2)] for _ in range(sets)
    ]
    contenders = [
        Contender(
            "ddtree", [partial(_ours, q, k, v, rows) for rows in every_rows], partial(_check, q, k, v, every_rows[-1])
        ),
        Contender("torch flash, no mask", [partial(_flash, query, *x) for x in dense]),
    ]
    report.compare(SECTION, case, contenders, flops=4 * batch * NODES * heads * kv * dim)


def _ours(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    return verify_attn(q, k, v, rows, scale=q.shape[2] ** -0.5)


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _check(q: Tensor, k: Tensor, v: Tensor, rows: Rows) -> None:
    """The last sequence against float64."""
    out, _ = _ours(q, k, v, rows)
    s, kv, group = len(rows.seq_len) - 1, int(rows.seq_len[0]), q.shape[1] // k.shape[2]
    slots = slots_of(rows.page_table[s], kv + NODES)
    keys, values = (x.flatten(0, 1)[slots].double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,khd->nhk", q[s * NODES :].double(), keys) * q.shape[2] ** -0.5
    scores[:, :, kv:].masked_fill_(~see(rows.ancestors[s * NODES :], NODES)[:, None], -torch.inf)
    wanted = torch.einsum("nhk,khd->nhd", scores.softmax(-1), values)
    error = float((out[s * NODES :].double() - wanted).norm() / wanted.norm())
    assert error < 1e-2, f"relative error {error:.2g} against float64"
