"""verify_attn_mla in Triton: the baseline that the CUDA kernels are measured against, and nothing serves with it.

A tile is 64 rows of node × H + head of one sequence, so that a few nodes fill a matrix instruction. It walks its share of
the keys once: blocks of the committed prefix without a mask, the rest with one. Shares are joined by their log-sum-exp.
"""

# mypy: disable-error-code="no-untyped-def, attr-defined"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddtree.kernels.rows import Rows

_TILE = 64  # rows of a tile
_KEYS = 32  # keys of a block; 64 would need more shared memory than an H200 has
_MOST_SPLITS = 64
_LOG2E = tl.constexpr(1.4426950408889634)
_EXACT = tl.constexpr("ieee")  # float32 inputs: no tf32


def verify_attn_mla(
    q: Tensor, kv_cache: Tensor, rows: Rows, *, scale: float, v_dim: int, splits: int | None = None
) -> tuple[Tensor, Tensor]:
    """As `ddtree.kernels.verify_attn_mla`, for tensors on a CUDA device, or on the CPU under TRITON_INTERPRET=1.

    Args:
        q, kv_cache, rows, scale, v_dim: as there; float32, bfloat16 or float16.
        splits: shares that a sequence's keys are cut into; None: as many as fill the device. Bits are equal for equal
            (shape, splits).
    """
    total, heads, dim = q.shape
    sequences = len(rows.q_len)
    out, lse = q.new_empty(total, heads, v_dim), q.new_empty(total, heads, dtype=torch.float32)
    if not total * heads:
        return out, lse
    tiles = triton.cdiv(total * heads, _TILE) + sequences  # at most: each sequence may leave one tile part empty
    splits = splits or _fill(tiles - sequences, q.device)
    part, part_lse = out, lse
    if splits > 1:
        part = q.new_empty(splits, total, heads, v_dim, dtype=torch.float32)
        part_lse = q.new_empty(splits, total, heads, dtype=torch.float32)
    q = q.contiguous()
    _attend[(tiles, splits)](
        q, kv_cache, kv_cache.stride(1), part, part_lse,
        rows.row_offsets, rows.q_len, rows.seq_len, rows.page_table, rows.causal, rows.ancestors,
        scale * _LOG2E.value, heads, sequences, total, rows.page_table.shape[1], rows.ancestors.shape[1],
        rows.page_size, v_dim, dim - v_dim,
        triton.next_power_of_2(max(sequences, 32)), max(16, triton.next_power_of_2(v_dim)),
        max(16, triton.next_power_of_2(dim - v_dim)), _TILE, _KEYS, num_warps=8, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        width = triton.next_power_of_2(v_dim)
        _join[(total * heads,)](part, part_lse, out, lse, total * heads, v_dim, splits, width, num_warps=4)
    return out, lse


def _fill(tiles: int, device: torch.device) -> int:
    """As many splits as keep every multiprocessor busy once."""
    if device.type == "cpu":
        return 1
    return min(_MOST_SPLITS, max(1, torch.cuda.get_device_properties(device).multi_processor_count // tiles))


@triton.jit(do_not_specialize=["heads", "sequences", "total", "pages", "words"])  # one compilation for every batch
def _attend(
    q_ptr, kv_ptr, kv_stride, out_ptr, lse_ptr,
    offsets_ptr, q_len_ptr, seq_len_ptr, pages_ptr, causal_ptr, ancestors_ptr,
    scale, heads, sequences, total, pages, words,
    PAGE: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    S_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, R_BLOCK: tl.constexpr, TILE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    # Which sequence is this tile's? Tiles are dealt out in order of sequences.
    every = tl.arange(0, S_BLOCK)
    begins = tl.load(offsets_ptr + every, mask=every < sequences, other=0)
    ends = tl.load(offsets_ptr + every + 1, mask=every < sequences, other=0)
    counts = ((ends - begins) * heads + TILE - 1) // TILE
    last = tl.cumsum(counts, 0)
    tile = tl.program_id(0)
    before = (last <= tile) & (every < sequences)
    s = tl.sum(before.to(tl.int32), 0)
    if s >= sequences:
        return
    tile -= tl.sum(tl.where(before, counts, 0), 0)

    begin = tl.load(offsets_ptr + s)
    capacity = tl.load(offsets_ptr + s + 1) - begin
    used = tl.load(q_len_ptr + s)
    committed = tl.load(seq_len_ptr + s)
    causal = tl.load(causal_ptr + s).to(tl.int32)
    first_bit = causal * (1 << 30)  # own rows from here on are looked up among the ancestors: none where causal

    local = tile * TILE + tl.arange(0, TILE)
    i = local // heads  # row of the sequence
    live = i < used
    horizon = causal * (i + 1) - 1  # own rows up to here are seen whatever the ancestors are: none in a tree
    row = (begin * heads + local).to(tl.int64)  # of q and out, seen as [T·H, width]
    v = tl.arange(0, V_BLOCK)
    r = tl.arange(0, R_BLOCK)
    q_v = tl.load(q_ptr + row[:, None] * (V + R) + v[None, :], mask=live[:, None] & (v < V)[None, :], other=0.0)
    q_r = tl.load(q_ptr + row[:, None] * (V + R) + (V + r)[None, :], mask=live[:, None] & (r < R)[None, :], other=0.0)

    # A row sees none after itself, so the tile's last row in use bounds the keys.
    end = committed + tl.minimum(used, (tile * TILE + TILE - 1) // heads + 1)
    end = tl.where(tile * TILE < used * heads, end, 0)
    share = tl.cdiv(tl.cdiv(end, KEYS), tl.num_programs(1)) * KEYS
    low = tl.program_id(1) * share
    high = tl.minimum(low + share, end)
    unmasked = tl.minimum(tl.maximum(committed // KEYS * KEYS, low), high)

    top = tl.full([TILE], -float("inf"), tl.float32)
    denominator = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, V_BLOCK], tl.float32)
    table = pages_ptr + s * pages
    for first in range(low, unmasked, KEYS):
        k = first + tl.arange(0, KEYS)
        slot = tl.load(table + k // PAGE).to(tl.int64) * PAGE + k % PAGE
        at = kv_ptr + slot * kv_stride
        k_v = tl.load(at[:, None] + v[None, :], mask=(v < V)[None, :], other=0.0)
        k_r = tl.load(at[:, None] + (V + r)[None, :], mask=(r < R)[None, :], other=0.0)
        scores = _scores(q_v, q_r, k_v, k_r, scale)
        top, denominator, acc = _update(scores, k_v, top, denominator, acc)
    for first in range(unmasked, high, KEYS):
        k = first + tl.arange(0, KEYS)
        there = k < high
        slot = tl.load(table + k // PAGE, mask=there, other=0).to(tl.int64) * PAGE + k % PAGE
        at = kv_ptr + slot * kv_stride
        k_v = tl.load(at[:, None] + v[None, :], mask=there[:, None] & (v < V)[None, :], other=0.0)
        k_r = tl.load(at[:, None] + (V + r)[None, :], mask=there[:, None] & (r < R)[None, :], other=0.0)
        own = k - committed  # < 0: committed
        bits = tl.load(
            ancestors_ptr + (begin + i)[:, None].to(tl.int64) * words + (own // 32)[None, :],
            mask=live[:, None] & (there & (own >= first_bit))[None, :],
            other=0,
        )
        seen = (own[None, :] <= horizon[:, None]) | (((bits >> (own & 31)[None, :]) & 1) != 0)
        seen = seen & there[None, :]
        scores = tl.where(seen, _scores(q_v, q_r, k_v, k_r, scale), -float("inf"))
        top, denominator, acc = _update(scores, k_v, top, denominator, acc)

    some = live & (denominator > 0)
    denominator = tl.where(some, denominator, 1.0)
    acc = tl.where(some[:, None], acc / denominator[:, None], 0.0)
    lse = tl.where(some, (top + tl.log2(denominator)) / _LOG2E, -float("inf"))
    row += tl.program_id(1).to(tl.int64) * total * heads
    inside = local < capacity * heads
    tl.store(lse_ptr + row, lse, mask=inside)
    tl.store(
        out_ptr + row[:, None] * V + v[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=inside[:, None] & (v < V)[None, :],
    )


@triton.jit
def _scores(q_v, q_r, k_v, k_r, scale):
    scores = tl.dot(q_v, tl.trans(k_v), input_precision=_EXACT)
    return tl.dot(q_r, tl.trans(k_r), scores, input_precision=_EXACT) * scale


@triton.jit
def _update(scores, values, top, denominator, acc):
    """One block of the online softmax, in base 2. A row that has seen no key keeps top -inf and everything else 0."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == -float("inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(top - base)
    acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision=_EXACT)
    return new_top, denominator * decay + tl.sum(weights, 1), acc


@triton.jit(do_not_specialize=["rows"])
def _join(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, rows, V: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    v = tl.arange(0, WIDTH)
    top = tl.load(part_lse_ptr + row)
    for split in range(1, SPLITS):
        top = tl.maximum(top, tl.load(part_lse_ptr + tl.cast(split, tl.int64) * rows + row))
    some = top != -float("inf")
    base = tl.where(some, top, 0.0)
    acc = tl.zeros([WIDTH], tl.float32)
    denominator = 0.0
    for split in range(SPLITS):
        at = tl.cast(split, tl.int64) * rows + row
        weight = tl.exp(tl.load(part_lse_ptr + at) - base)
        acc += weight * tl.load(part_ptr + at * V + v, mask=v < V, other=0.0)
        denominator += weight
    denominator = tl.where(some, denominator, 1.0)
    tl.store(out_ptr + row * V + v, (acc / denominator).to(out_ptr.dtype.element_ty), mask=v < V)
    tl.store(lse_ptr + row, top + tl.log(denominator))
