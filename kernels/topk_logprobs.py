"""Log-probabilities of the K most probable tokens of each row: the checked entry point. Knows no model."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.kernels.checks import check
from ddtree.kernels.dispatch import implementation


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
    check("logits", logits, (None, None), (torch.float32, torch.bfloat16, torch.float16), logits.device)
    if k < 0:
        raise ValueError(f"k is {k}; pass 0 or more.")
    return implementation(logits.device).topk_logprobs(logits, k)
