"""The four operations that need a kernel on a GPU: contract and reference of each; triton_ops.py has the kernels.

On CUDA the kernel runs, on the CPU the reference, which is also what the kernels are tested against.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def decode_attention(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, scale: float) -> Tensor:
    """Attention of one token per sequence over a static cache.

    Args:
        q: `[B, H, D]`.
        k, v: `[B, KV, S, D]` contiguous; H is a multiple of KV.
        pos: `[B]` int64: keys 0 .. pos[b] are seen.
        scale: of the scores.
    Returns:
        `[B, H, D]` in q's dtype.
    """
    group, dim = q.shape[1] // k.shape[1], q.shape[2]
    if q.is_cuda and group <= 16 and dim >= 16 and dim & (dim - 1) == 0:
        from ddtree.drafter.training import triton_ops

        return triton_ops.decode_attention(q.contiguous(), k, v, pos, scale)
    return decode_attention_reference(q, k, v, pos, scale)


def decode_attention_reference(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, scale: float) -> Tensor:
    """See `decode_attention`."""
    end = (
        k.shape[2] if k.is_cuda else int(pos.max()) + 1
    )  # on a GPU the length may not be read: it would stop a graph capture
    seen = torch.arange(end, device=pos.device) <= pos[:, None]
    grouped = q.unflatten(1, (k.shape[1], -1))  # the query heads of one key/value head as rows
    out = F.scaled_dot_product_attention(
        grouped, k[:, :, :end], v[:, :, :end], attn_mask=seen[:, None, None], scale=scale
    )
    return out.flatten(1, 2)


def gumbel_argmax(logits: Tensor, temperature: Tensor, step: Tensor) -> Tensor:
    """One sample per row of softmax(logits / temperature): the argmax of logits + temperature · Gumbel noise.

    Args:
        logits: `[B, V]`.
        temperature: `[B]` fp32; 0 is greedy.
        step: `[1]` int64 on the device, seeds the noise; another step, other noise.
    Returns:
        `[B]` int64.
    """
    if logits.is_cuda:
        from ddtree.drafter.training import triton_ops

        return triton_ops.gumbel_argmax(logits, temperature, step)
    return gumbel_argmax_reference(logits, temperature, step)


def gumbel_argmax_reference(logits: Tensor, temperature: Tensor, step: Tensor) -> Tensor:
    """See `gumbel_argmax`; the noise differs from the kernel's, the distribution does not."""
    generator = torch.Generator(logits.device).manual_seed(int(step))
    noise = -torch.empty(logits.shape, device=logits.device).exponential_(generator=generator).log()
    return (logits.float() + temperature[:, None] * noise).argmax(-1)


def cross_entropy_(
    logits: Tensor, teacher: Tensor, teacher_lse: Tensor, teacher_row: Tensor, labels: Tensor, weight: Tensor, soft: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Weighted cross-entropy of each row; `logits` is overwritten by its gradient, so that 49k columns are stored once.

    Row r is taught by softmax(teacher[teacher_row[r]]) with share soft[r] and by labels[r] with the rest.

    Args:
        logits: `[N, V]`, any float dtype, contiguous; overwritten.
        teacher: `[M, V]` with log-sum-exp `teacher_lse` `[M]` fp32.
        teacher_row: `[N]` int32.
        labels: `[N]` int64.
        weight, soft: `[N]` fp32.
    Returns:
        `(loss, hit)`, both `[N]` fp32: the weighted loss, and 1 where the row's argmax is its label.
    """
    if logits.is_cuda:
        from ddtree.drafter.training import triton_ops

        return triton_ops.cross_entropy_(logits, teacher, teacher_lse, teacher_row, labels, weight, soft)
    loss, hit, grad = cross_entropy_reference(logits, teacher, teacher_lse, teacher_row, labels, weight, soft)
    logits.copy_(grad)
    return loss, hit


@torch.enable_grad()
def cross_entropy_reference(
    logits: Tensor, teacher: Tensor, teacher_lse: Tensor, teacher_row: Tensor, labels: Tensor, weight: Tensor, soft: Tensor
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `cross_entropy_`, but `(loss, hit, gradient)` and the logits stay."""
    x = logits.float().detach().requires_grad_()
    wanted = soft[:, None] * (teacher.float() - teacher_lse[:, None]).exp()[teacher_row.long()]
    wanted[torch.arange(len(labels), device=labels.device), labels] += 1 - soft
    loss = weight * (torch.logsumexp(x, -1) - (wanted * x).sum(-1))
    (grad,) = torch.autograd.grad(loss.sum(), x)
    return loss.detach(), (logits.float().argmax(-1) == labels).float(), grad


def row_logsumexp(logits: Tensor) -> Tensor:
    """`[M, V]` contiguous → `[M]` fp32, without an fp32 copy on a GPU."""
    if logits.is_cuda:
        from ddtree.drafter.training import triton_ops

        return triton_ops.row_logsumexp(logits)
    return logits.float().logsumexp(-1)
