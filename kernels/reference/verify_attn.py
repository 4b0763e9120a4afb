"""Definition of `verify_attn` and `verify_attn_mla`. It also serves on the CPU.

One dense attention per sequence, so a sequence's result has the same bits whatever else is in the batch. The query
heads that share a key head become rows of it: several times faster than repeating the keys (few rows, long prefix).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.kernels.reference.attention_plan import AttentionPlan
from ddtree.kernels.rows import Rows

WIDE_FLASH_ROWS = 32  # from here on the blocked kernel is the faster one in float64


def verify_attn(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Rows, *, scale: float, batch_invariant: bool = False
) -> tuple[Tensor, Tensor]:
    (total, q_heads, dim), kv_heads = q.shape, k_cache.shape[2]
    group = q_heads // kv_heads
    q = q.view(total, kv_heads, group, dim)
    keys = k_cache.flatten(0, 1)
    values = keys if v_cache is k_cache else v_cache.flatten(0, 1)
    attend = wide_attention if batch_invariant else flash_attention if q.is_cpu else dense_attention
    outs, weights = [q.new_empty(0, kv_heads, group, dim)], [q.new_empty(0, kv_heads, group, dtype=torch.float32)]
    for part in rows.keep(AttentionPlan, lambda: AttentionPlan.of(rows)).segments:
        if part.count:
            key = keys.index_select(0, part.slots).transpose(0, 1)
            value = key if values is keys else values.index_select(0, part.slots).transpose(0, 1)
            query = q[part.begin : part.begin + part.count].transpose(0, 1).reshape(kv_heads, -1, dim)
            out, lse = attend(query, key, value, part.bias(group, torch.float64 if batch_invariant else q.dtype), scale)
            outs.append(out.view(kv_heads, part.count, group, dim).transpose(0, 1))
            weights.append(lse.view(kv_heads, part.count, group).transpose(0, 1))
        if part.unused:
            outs.append(q.new_zeros(part.unused, kv_heads, group, dim))
            weights.append(q.new_full((part.unused, kv_heads, group), -torch.inf, dtype=torch.float32))
    return torch.cat(outs).view(total, q_heads, dim), torch.cat(weights).view(total, q_heads).float()


def verify_attn_mla(q: Tensor, kv_cache: Tensor, rows: Rows, *, scale: float, v_dim: int) -> tuple[Tensor, Tensor]:
    latent = kv_cache.unsqueeze(2)  # one key head; its first v_dim columns are the value
    out, lse = verify_attn(q, latent, latent, rows, scale=scale)
    return out[..., :v_dim].contiguous(), lse


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention in float32 (float64 for float64 input), written out.

    query [H, R, D], key and value [H, n, D], bias [R, n] or None → out [H, R, D], log-sum-exp [H, R].
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).mT * scale
    if bias is not None:
        scores += bias
    lse = scores.logsumexp(-1)
    return ((scores - lse[..., None]).exp() @ value.to(wide)).to(query.dtype), lse


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The same through the CPU kernel behind `scaled_dot_product_attention`, which also returns the log-sum-exp."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), 0.0, False, attn_mask=bias, scale=scale
    )
    return out[0], lse[0]


def wide_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The same in float64, on a CPU. Which sums are formed first depends on how many rows there are and on where in a tree the
    keys lie; in float64 that changes the 16th digit, of which three are kept in bfloat16."""
    attend = dense_attention if query.shape[1] < WIDE_FLASH_ROWS else flash_attention
    out, lse = attend(query.double(), key.double(), value.double(), bias, scale)
    return out.to(query.dtype), lse
