"""Candidates ranked by the draw that is to come, whether or not they depend on paths. Knows no requests and no rounds."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ddtree.drafter.items import Candidates
from ddtree.kernels import share_noise, share_noise_path


def noised(candidates: Candidates, seed: Tensor, seq_len: Tensor, scale: Tensor) -> Candidates:
    """See `share_noise`, whose arguments these are."""
    draws = (candidates.ids, seed, seq_len, scale)
    if candidates.conditional is None:
        return Candidates(*share_noise(candidates.logprobs, *draws))
    first, below = share_noise_path(candidates.logprobs[:, 0], candidates.conditional, *draws)
    return replace(candidates, logprobs=torch.cat((first[:, None], candidates.logprobs[:, 1:]), 1), conditional=below)
