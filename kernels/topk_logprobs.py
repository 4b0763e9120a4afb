"""Log-probabilities of the K most probable tokens of each row: the checked entry points. Knows no model."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.kernels.checks import check, check_int32
from ddtree.kernels.dispatch import implementation

_LOGITS = (torch.float32, torch.bfloat16, torch.float16)


def topk_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-softmax over each row, then its K best candidates, ordered by (logit descending, token id ascending).

    The order is that of the logits: two different logits stay in order where their log-probs round to the same value.
    A logit that is not finite is no candidate and has no share in the softmax.

    Args:
        logits: [R, V] float32, bfloat16 or float16.
        k: candidates wanted per row, 0 or more; may exceed V.

    Returns:
        logprobs [R, K] float32 and ids [R, K] int32; missing candidates have logprob -inf and id -1.

    Raises:
        ValueError: wrong shape, dtype or k.

    Example:
        >>> topk_logprobs(torch.tensor([[0.0, 1.0, 1.0]]), 2)[1]
        tensor([[1, 2]], dtype=torch.int32)
    """
    check("logits", logits, (None, None), _LOGITS, logits.device)
    if k < 0:
        raise ValueError(f"k is {k}; pass 0 or more.")
    return implementation(logits.device).topk_logprobs(logits, k)


def topk_partial(logits: Tensor, k: int, first_id: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """What one rank of a split vocabulary contributes to `topk_logprobs`: the K best of its columns, and their softmax.

    Args:
        logits: [R, V] float32, bfloat16 or float16, the rank's columns.
        k: candidates wanted per row in the end, 0 or more.
        first_id: token id of column 0.

    Returns:
        values [R, K] float32, the logits themselves in the order of `topk_logprobs`; ids [R, K] int32; lse [R] float32,
        the log of the sum of exp over the finite logits. Missing candidates: value -inf, id -1.

    Raises:
        ValueError: wrong shape, dtype, k or first_id.

    Example:
        >>> topk_partial(torch.tensor([[0.0, 1.0, 1.0]]), 2, first_id=10)[:2]
        (tensor([[1., 1.]]), tensor([[11, 12]], dtype=torch.int32))
    """
    check("logits", logits, (None, None), _LOGITS, logits.device)
    if k < 0 or first_id < 0:
        raise ValueError(f"k is {k} and first_id {first_id}; pass 0 or more.")
    return implementation(logits.device).topk_partial(logits, k, first_id)


def topk_merge(values: Tensor, ids: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Joins what P ranks' `topk_partial` gave: equals `topk_logprobs` of the whole vocabulary.

    Args:
        values: [P, R, K] float32.
        ids: [P, R, K] int32; different within a row.
        lse: [P, R] float32.

    Returns:
        logprobs [R, K] float32 and ids [R, K] int32.

    Raises:
        ValueError: wrong shape, dtype or device.

    Example:
        >>> x = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
        >>> left, right = topk_partial(x[:, :2], 2), topk_partial(x[:, 2:], 2, first_id=2)
        >>> topk_merge(*(torch.stack(pair) for pair in zip(left, right, strict=True)))[1]
        tensor([[1, 3]], dtype=torch.int32)
    """
    check("values", values, (None, None, None), (torch.float32,), values.device)
    check_int32("ids", ids, tuple(values.shape), values.device)
    check("lse", lse, tuple(values.shape[:2]), (torch.float32,), values.device)
    return implementation(values.device).topk_merge(values, ids, lse)
