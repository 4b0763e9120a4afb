"""verify_attn_mla: both CUDA kernels, the Triton baseline, and FlashMLA without the tree and with it in a second pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ddtree.kernels import Rows, cuda, native, triton_mla

from .data import PAGE, Candidates, page_tables, see, slots_of, tree_rows
from .measure import Contender, input_sets
from .peers import FlashMla, Peers, merge_state
from .report import Report

SECTION = "verify_attn_mla"
NODES, DIM, V_DIM = 64, 576, 512
SCALE = 192**-0.5  # DeepSeek-V3 and Kimi K2: of the query's 128 + 64 columns before absorption
HEADS, LENGTHS, BATCHES = (8, 16, 64, 128), (4096, 32_768, 131_072), (1, 8, 32)
MOST_US, MOST_BYTES = 20_000, 40e9  # longer and larger cases are left out
LARGE_US = 150  # a case is large where the matmul rate alone would take that long
HOPPER, PORTABLE, TRITON = "ddtree Hopper", "ddtree portable", "Triton"
PREFIX, TWO_PASSES = "FlashMLA, prefix only", "FlashMLA + tree + merge"
LEAST_SHARE = {HOPPER: 0.6, PORTABLE: 0.45}

Attend = Callable[[Tensor, Tensor, Rows], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Inputs:
    """One input set: the whole step of one layer."""

    q: Tensor  # [T, H, 576]
    cache: Tensor  # [pages, 64, 576]
    rows: Rows
    own: Tensor  # [B, 64, 576] the trees' own latents, as a cache of one page per sequence
    own_rows: Rows  # the trees over `own`, with nothing committed


def run(report: Report, peers: Peers) -> None:
    shares: dict[str, list[float]] = {HOPPER: [], PORTABLE: []}
    grid = (
        itertools.product((8, 64), LENGTHS[:2], (1, 8)) if report.quick else itertools.product(HEADS, LENGTHS, BATCHES)
    )
    for heads, kv, batch in grid:
        flops = 2 * batch * NODES * heads * kv * (DIM + V_DIM)
        ideal_us = flops / report.rates.matmul / 1e6
        if ideal_us * 2.5 > MOST_US or batch * kv * DIM * 2 > MOST_BYTES:
            continue
        case = {"heads": heads, "kv": kv, "batch": batch}
        us = report.compare(SECTION, case, contenders(inputs(heads, kv, batch), peers), flops=flops)
        if ideal_us >= LARGE_US:
            for name, values in shares.items():
                values.append(ideal_us / us[name] if name in us else 0.0)  # a wrong kernel has no share
    _remark_on_two_passes(report)
    for name, values in shares.items():
        bar = f"verify_attn_mla, {name}, least share of the matmul rate where that takes ≥ {LARGE_US} µs"
        report.bar(bar, min(values, default=None), at_least=LEAST_SHARE[name])
    report.remarks.append(
        f"verify_attn_mla: {NODES} rows a sequence (budget 63). Plans and FlashMLA's schedule are made once, before. FLOP are "
        "those of the committed prefix. 'FlashMLA, prefix only' lets no row see the tree, so it is not the operation; the "
        "second adds the tree in a pass of its own (the Triton baseline over the trees' latents) and sglang's merge_state_v2."
    )


def _remark_on_two_passes(report: Report) -> None:
    """How one fused pass stands against two, over all cases."""
    ratios = []
    for figure in report.figures:
        ours = report.us(SECTION, HOPPER, **figure.case)
        if figure.contender == TWO_PASSES and figure.timing and ours:
            ratios.append(figure.timing.us / ours)
    if ratios:
        report.remarks.append(
            f"{HOPPER} over {TWO_PASSES}: {min(ratios):.2f}× to {max(ratios):.2f}×, faster in {sum(r > 1 for r in ratios)} "
            f"of {len(ratios)} cases."
        )


def inputs(heads: int, kv: int, batch: int) -> list[Inputs]:
    sets = input_sets(batch * kv * DIM * 2)
    pages, tables = page_tables(sets, batch, kv + NODES)
    cache = torch.empty(pages, PAGE, DIM, dtype=torch.bfloat16, device="cuda").normal_()
    tree = Candidates.random(batch, seed=kv).tree(NODES - 1)
    alone = torch.arange(batch, dtype=torch.int32, device="cuda")[:, None]
    made = []
    for table in tables:
        q = torch.randn(batch * NODES, heads, DIM, device="cuda").bfloat16()
        slots = torch.stack([slots_of(pages_of_one, kv + NODES)[kv:] for pages_of_one in table])
        own = cache.flatten(0, 1)[slots]
        made.append(Inputs(q, cache, tree_rows(tree, kv, table), own, tree_rows(tree, 0, alone, NODES)))
    return made


def contenders(sets: list[Inputs], peers: Peers) -> list[Contender]:
    def one(name: str, attend: Callable[[Inputs], tuple[Tensor, Tensor]], tree: bool = True) -> Contender:
        return Contender(name, [partial(attend, x) for x in sets], partial(_check, attend, sets[-1], tree))

    found = [
        one(name, partial(_ours, kernel))
        for name, kernel in ((HOPPER, native.KERNEL_HOPPER), (PORTABLE, native.KERNEL_PORTABLE))
    ]
    found.append(one(TRITON, _triton))
    if peers.flashmla:
        flash = FlashMla(sets[0].rows.seq_len, NODES, SCALE)
        found.append(one(PREFIX, partial(_prefix, flash), tree=False))
        if peers.common:
            found.append(one(TWO_PASSES, partial(_two_passes, flash)))
    return found


def _ours(kernel: int, x: Inputs) -> tuple[Tensor, Tensor]:
    return cuda.verify_attn_mla(x.q, x.cache, x.rows, scale=SCALE, v_dim=V_DIM, kernel=kernel)


def _triton(x: Inputs) -> tuple[Tensor, Tensor]:
    return triton_mla.verify_attn_mla(x.q, x.cache, x.rows, scale=SCALE, v_dim=V_DIM)


def _prefix(flash: FlashMla, x: Inputs) -> tuple[Tensor, Tensor]:
    return flash(x.q, x.cache, x.rows.page_table)


def _two_passes(flash: FlashMla, x: Inputs) -> tuple[Tensor, Tensor]:
    tree = triton_mla.verify_attn_mla(x.q, x.own, x.own_rows, scale=SCALE, v_dim=V_DIM, splits=1)
    return merge_state(*_prefix(flash, x), *tree)


def _check(attend: Callable[[Inputs], tuple[Tensor, Tensor]], x: Inputs, tree: bool) -> None:
    """A few nodes of the first and last sequence against float64."""
    out, lse = attend(x)
    kv, last = int(x.rows.seq_len[0]), len(x.rows.seq_len) - 1
    for s in {0, last}:
        nodes = torch.tensor([0, 1, 31, NODES - 1], device="cuda")
        slots = slots_of(x.rows.page_table[s], kv + (NODES if tree else 0))
        keys = x.cache.flatten(0, 1)[slots].double()
        scores = torch.einsum("nhd,kd->nhk", x.q[s * NODES + nodes].double(), keys) * SCALE
        if tree:
            seen = see(x.rows.ancestors[s * NODES + nodes], NODES)
            scores[:, :, kv:].masked_fill_(~seen[:, None], -torch.inf)
        wanted_lse = scores.logsumexp(-1)
        wanted = (scores - wanted_lse[..., None]).exp() @ keys[:, :V_DIM]
        got, got_lse = out[s * NODES + nodes].double(), lse[s * NODES + nodes].double()
        error = float((got - wanted).norm() / wanted.norm())
        assert error < 1e-2, f"relative error {error:.2g} against float64"
        assert float((got_lse - wanted_lse).abs().max()) < 2e-3, "lse differs from float64's"
