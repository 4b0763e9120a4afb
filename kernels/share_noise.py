"""Candidates ranked by the draw that is to come: the checked entry point. Knows candidates, not trees and not the target."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.kernels.checks import check, check_int32, check_reachable
from ddtree.kernels.dispatch import implementation


def share_noise(logprobs: Tensor, ids: Tensor, seed: Tensor, seq_len: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Adds to each candidate the Gumbel number that the target will add to its own logit when it draws (noise.py).

    At temperature T the target's token at position p is argmax(logits + T · g(seed, p, id)), and g is known beforehand. So
    candidates are ranked by logprob + scale · g, and the softmax over these scores stands for their chances. How much of T
    the scale should be depends on how well the drafter knows the logits (docs/experiments.md). This changes which tokens are
    proposed, never what is drawn.

    Args:
        logprobs: [B, L, K] float32 ≤ 0; a value that is not finite is no candidate.
        ids: [B, L, K] int32; different within a row.
        seed: [B] int64 of the sequence's draws.
        seq_len: [B] int32 absolute position of node 0; level d stands at seq_len + 1 + d.
        scale: [B] float32 of the noise; where it is 0 nothing will be drawn, and a sequence's rows stay as they are.

    With candidates on a GPU the last three may lie in pinned host memory, as for `tree_build`.

    Returns:
        logprobs [B, L, K] float32, each row descending, and ids [B, L, K] int32; missing candidates: -inf and -1.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    device = logprobs.device
    check("logprobs", logprobs, (None, None, None), (torch.float32,), device)
    batch = logprobs.shape[0]
    check_int32("ids", ids, tuple(logprobs.shape), device)
    check_reachable("seed", seed, (batch,), device, torch.int64)
    check_reachable("seq_len", seq_len, (batch,), device)
    check_reachable("scale", scale, (batch,), device, torch.float32)
    return implementation(device).share_noise(logprobs, ids, seed, seq_len, scale)


def share_noise_path(
    first: Tensor, conditional: Tensor, ids: Tensor, seed: Tensor, seq_len: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """`share_noise` of log-probs that depend on the parent, as `tree_build_path` takes them: candidates stay where they are.

    Args:
        first: [B, K] float32 ≤ 0 of the candidates of depth 1; a value that is not finite is no candidate, here and below.
        conditional: [B, L-1, K, K] float32 ≤ 0; [b, d-1, i, j] of candidate j of depth d + 1 after candidate i of depth d.
        ids: [B, L, K] int32; different within a row.
        seed, seq_len, scale: as in `share_noise`.

    Returns:
        first and conditional, each row normalised; missing candidates: -inf.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    device = first.device
    check_int32("ids", ids, (None, None, None), device)
    batch, levels, k = ids.shape
    check("first", first, (batch, k), (torch.float32,), device)
    check("conditional", conditional, (batch, max(levels - 1, 0), k, k), (torch.float32,), device)
    check_reachable("seed", seed, (batch,), device, torch.int64)
    check_reachable("seq_len", seq_len, (batch,), device)
    check_reachable("scale", scale, (batch,), device, torch.float32)
    shared: tuple[Tensor, Tensor] = implementation(device).share_noise_path(
        first, conditional, ids, seed, seq_len, scale
    )
    return shared
