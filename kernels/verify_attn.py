"""Attention of draft-tree nodes and prompt chunks over a paged KV cache: the checked entry points. Knows no model."""

from __future__ import annotations

from torch import Tensor

from ddtree.kernels import reference
from ddtree.kernels.checks import FLOATS, check, check_slots
from ddtree.kernels.dispatch import implementation
from ddtree.kernels.rows import Rows


def verify_attn(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Rows, *, scale: float, batch_invariant: bool = False
) -> tuple[Tensor, Tensor]:
    """Each row attends to its sequence's committed prefix and to its own ancestors, itself included (GQA form).

    The step's keys and values must already be in the cache, row i of a sequence at slot seq_len + i. Slots that no row
    may see are not read, or have weight exactly 0: they must be finite only where they belong to a row in use.

    Args:
        q: [T, Hq, D] float32, bfloat16 or float16 (float64 too, for tests).
        k_cache, v_cache: [pages, page_size, Hkv, D], same dtype, contiguous over pages and slots. Hq is a multiple of
            Hkv, and query head h reads key head h // (Hq / Hkv).
        rows: layout of the T rows.
        scale: factor of the scores before the softmax.
        batch_invariant: on a CPU alone: a row in bfloat16 or float16 gets the same bits as a row of a tree, of a chunk and
            by itself, but for one in about 10^11. Slower.

    Returns:
        out [T, Hq, D] in q's dtype, and lse [T, Hq] float32: the natural log of each softmax's denominator. Rows past
        q_len have out 0 and lse -inf.

    Raises:
        ValueError: wrong shape, dtype, device or memory layout, or rows that contradict each other.

    Example:
        >>> out, lse = verify_attn(q, k_cache[layer], v_cache[layer], rows, scale=q.shape[-1] ** -0.5)
    """
    check("q", q, (rows.ancestors.shape[0], None, None), FLOATS, None)
    rows.must_be_on(q.device)
    check("k_cache", k_cache, (None, rows.page_size, None, q.shape[2]), (q.dtype,), q.device)
    check("v_cache", v_cache, tuple(k_cache.shape), (q.dtype,), q.device)
    check_slots("k_cache", k_cache, 0, rows.page_size)
    check_slots("v_cache", v_cache, 0, rows.page_size)
    if k_cache.shape[2] == 0 or q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"q has {q.shape[1]} heads; pass a multiple of the {k_cache.shape[2]} heads of k_cache.")
    if not batch_invariant:
        return implementation(q.device).verify_attn(q, k_cache, v_cache, rows, scale=scale)
    if not q.is_cpu:
        raise ValueError(f"q is on {q.device}; batch_invariant attention is for tensors on a cpu.")
    return reference.verify_attn(q, k_cache, v_cache, rows, scale=scale, batch_invariant=True)


def verify_attn_mla(q: Tensor, kv_cache: Tensor, rows: Rows, *, scale: float, v_dim: int) -> tuple[Tensor, Tensor]:
    """`verify_attn` for multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    All heads share one latent row per slot: the key is the whole row, the value its first v_dim columns.

    Args:
        q: [T, H, Dl+Dr] float32, bfloat16 or float16 (float64 too, for tests).
        kv_cache: [pages, page_size, Dl+Dr], same dtype, contiguous over pages and slots.
        rows, scale: as in `verify_attn`.
        v_dim: Dl, at most Dl+Dr.

    Returns:
        out [T, H, v_dim] in q's dtype, and lse [T, H] float32, as in `verify_attn`.

    Raises:
        ValueError: as in `verify_attn`.
    """
    check("q", q, (rows.ancestors.shape[0], None, None), FLOATS, None)
    rows.must_be_on(q.device)
    check("kv_cache", kv_cache, (None, rows.page_size, q.shape[2]), (q.dtype,), q.device)
    check_slots("kv_cache", kv_cache, 0, rows.page_size)
    if not 0 < v_dim <= q.shape[2]:
        raise ValueError(f"v_dim is {v_dim}; pass 1 … {q.shape[2]}, the width of kv_cache.")
    return implementation(q.device).verify_attn_mla(q, kv_cache, rows, scale=scale, v_dim=v_dim)
