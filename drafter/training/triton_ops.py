"""Triton kernels of training: attention of one token over a static cache, Gumbel sampling, losses over a large vocabulary.

Raw launches; ops.py has the contracts and the references, and chooses between them.
"""

# mypy: disable-error-code="no-untyped-def, attr-defined"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_VOCAB_BLOCK = 4096


@triton.jit
def _decode_attention(
    q_ptr, k_ptr, v_ptr, o_ptr, pos_ptr, S, scale, KVH: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLK: tl.constexpr
):  # fmt: skip
    b = tl.program_id(0)
    h = tl.program_id(1)
    n = tl.load(pos_ptr + b) + 1
    g = tl.arange(0, 16)
    d = tl.arange(0, D)
    qo = (b * KVH * G + h * G + g)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + qo, mask=(g < G)[:, None], other=0.0)
    base = (b * KVH + h).to(tl.int64) * S * D
    m = tl.full([16], -1e30, tl.float32)
    s = tl.zeros([16], tl.float32)
    acc = tl.zeros([16, D], tl.float32)
    for start in range(0, n, BLK):
        j = start + tl.arange(0, BLK)
        ok = j < n
        kk = tl.load(k_ptr + base + j[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
        vv = tl.load(v_ptr + base + j[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
        x = tl.dot(q, tl.trans(kk)).to(tl.float32) * scale
        x = tl.where(ok[None, :], x, -1e30)
        m2 = tl.maximum(m, tl.max(x, 1))
        p = tl.exp(x - m2[:, None])
        c = tl.exp(m - m2)
        s = s * c + tl.sum(p, 1)
        acc = acc * c[:, None] + tl.dot(p.to(vv.dtype), vv).to(tl.float32)
        m = m2
    tl.store(o_ptr + qo, (acc / s[:, None]).to(o_ptr.dtype.element_ty), mask=(g < G)[:, None])


def decode_attention(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, scale: float) -> Tensor:
    batch, heads, dim = q.shape
    kv_heads, size = k.shape[1], k.shape[2]
    out = torch.empty_like(q)
    grid = (batch, kv_heads)
    _decode_attention[grid](q, k, v, out, pos, size, scale, kv_heads, heads // kv_heads, dim, 64)
    return out


@triton.jit
def _gumbel_argmax(l_ptr, temp_ptr, step_ptr, out_ptr, V, BLK: tl.constexpr):
    b = tl.program_id(0)
    t = tl.load(temp_ptr + b)
    seed = tl.load(step_ptr)
    best = -float("inf")
    arg = 0
    for start in range(0, V, BLK):
        j = start + tl.arange(0, BLK)
        ok = j < V
        x = tl.load(l_ptr + b.to(tl.int64) * V + j, mask=ok, other=-float("inf")).to(tl.float32)
        u = tl.rand(seed, b * V + j)
        u = tl.minimum(tl.maximum(u, 1e-9), 1.0 - 6e-8)
        x = x - t * tl.log(-tl.log(u))
        x = tl.where(ok, x, -float("inf"))
        m = tl.max(x, 0)
        a = tl.argmax(x, 0) + start
        arg = tl.where(m > best, a, arg)
        best = tl.maximum(m, best)
    tl.store(out_ptr + b, arg.to(tl.int64))


def gumbel_argmax(logits: Tensor, temperature: Tensor, step: Tensor) -> Tensor:
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _gumbel_argmax[(rows,)](logits, temperature, step, out, vocab, _VOCAB_BLOCK)
    return out


@triton.jit
def _cross_entropy(
    l_ptr, t_ptr, tlse_ptr, tidx_ptr, lab_ptr, w_ptr, soft_ptr, loss_ptr, hit_ptr, V, BLK: tl.constexpr
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    w = tl.load(w_ptr + r)
    a = tl.load(soft_ptr + r)
    lab = tl.load(lab_ptr + r)
    ti = tl.load(tidx_ptr + r).to(tl.int64)
    tlse = tl.load(tlse_ptr + ti)
    m = -float("inf")
    s = 0.0
    best = -float("inf")
    arg = 0
    dot = 0.0
    for start in range(0, V, BLK):
        j = start + tl.arange(0, BLK)
        ok = j < V
        x = tl.load(l_ptr + r * V + j, mask=ok, other=-float("inf")).to(tl.float32)
        bm = tl.max(x, 0)
        ba = tl.argmax(x, 0) + start
        arg = tl.where(bm > best, ba, arg)
        best = tl.maximum(best, bm)
        m2 = tl.maximum(m, bm)
        s = s * tl.exp(m - m2) + tl.sum(tl.exp(x - m2), 0)
        m = m2
        if a > 0:
            y = tl.load(t_ptr + ti * V + j, mask=ok, other=-float("inf")).to(tl.float32)
            dot += tl.sum(tl.where(ok, tl.exp(y - tlse) * x, 0.0), 0)
    lse = m + tl.log(s)
    xl = tl.load(l_ptr + r * V + lab).to(tl.float32)
    tl.store(loss_ptr + r, w * (lse - a * dot - (1 - a) * xl))
    tl.store(hit_ptr + r, (arg == lab).to(tl.float32))
    for start in range(0, V, BLK):
        j = start + tl.arange(0, BLK)
        ok = j < V
        x = tl.load(l_ptr + r * V + j, mask=ok, other=-float("inf")).to(tl.float32)
        p = tl.exp(x - lse)
        if a > 0:
            y = tl.load(t_ptr + ti * V + j, mask=ok, other=-float("inf")).to(tl.float32)
            p -= a * tl.exp(y - tlse)
        p -= tl.where(j == lab, 1 - a, 0.0)
        tl.store(l_ptr + r * V + j, (w * p).to(l_ptr.dtype.element_ty), mask=ok)


def cross_entropy_(
    logits: Tensor, teacher: Tensor, teacher_lse: Tensor, teacher_row: Tensor, labels: Tensor, weight: Tensor, soft: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, vocab = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    hit = torch.empty_like(loss)
    _cross_entropy[(rows,)](
        logits, teacher, teacher_lse, teacher_row, labels, weight, soft, loss, hit, vocab, _VOCAB_BLOCK, num_warps=8
    )
    return loss, hit


@triton.jit
def _row_logsumexp(l_ptr, out_ptr, V, BLK: tl.constexpr):
    r = tl.program_id(0).to(tl.int64)
    m = -float("inf")
    s = 0.0
    for start in range(0, V, BLK):
        j = start + tl.arange(0, BLK)
        x = tl.load(l_ptr + r * V + j, mask=j < V, other=-float("inf")).to(tl.float32)
        m2 = tl.maximum(m, tl.max(x, 0))
        s = s * tl.exp(m - m2) + tl.sum(tl.exp(x - m2), 0)
        m = m2
    tl.store(out_ptr + r, m + tl.log(s))


def row_logsumexp(logits: Tensor) -> Tensor:
    out = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _row_logsumexp[(logits.shape[0],)](logits, out, logits.shape[1], _VOCAB_BLOCK, num_warps=8)
    return out
