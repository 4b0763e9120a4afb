"""Definition of `verify_attn` and `verify_attn_mla`. It also serves on the CPU.

One dense attention per sequence, so a sequence's result has the same bits whatever else is in the batch. The query
heads that share a key head become rows of it: several times faster than repeating the keys (few rows, long prefix).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ddtree.kernels.rows import Rows


def verify_attn(q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Rows, *, scale: float) -> tuple[Tensor, Tensor]:
    plan, (total, q_heads, dim), kv_heads = rows.plan, q.shape, k_cache.shape[2]
    group = q_heads // kv_heads
    q, out = (x.view(total, kv_heads, group, dim) for x in (q, torch.zeros_like(q)))
    lse = torch.full((total, kv_heads, group), -torch.inf, device=q.device)
    keys = k_cache.flatten(0, 1)
    values = keys if v_cache is k_cache else v_cache.flatten(0, 1)
    attend = flash_attention if q.is_cpu else dense_attention
    for segment in plan.segments:
        count = segment.rows.stop - segment.rows.start
        key = keys.index_select(0, segment.slots).transpose(0, 1)
        value = key if values is keys else values.index_select(0, segment.slots).transpose(0, 1)
        query = q[segment.rows].transpose(0, 1).reshape(kv_heads, count * group, dim)
        o, weight = attend(query, key, value, segment.bias(group, q.dtype), scale)
        out[segment.rows] = o.view(kv_heads, count, group, dim).transpose(0, 1)
        lse[segment.rows] = weight.view(kv_heads, count, group).transpose(0, 1)
    return out.view(total, q_heads, dim), lse.view(total, q_heads)


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
        query[None], key[None], value[None], 0.0, False, attn_mask=bias, scale=scale
    )
    return out[0], lse[0]
