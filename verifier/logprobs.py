"""Log-probabilities of tokens by the logits as the model gives them: before edits, temperature and all that shapes a draw. Knows
no model and no draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.kernels import topk_partial
from ddtree.verifier.batch import Logprobs
from ddtree.verifier.sampling import finite


def logprobs(logits: Tensor, tokens: Tensor, top: int) -> Logprobs:
    """What each row's softmax gives to its token and to the `top` most probable ones. Waits for no device.

    Args:
        logits: [L, V], any float type.
        tokens: [L] int32 token ids; below 0 only where a logit of the row is not finite.
    """
    best, ids, total = topk_partial(logits, min(top, logits.shape[1]))
    tokens = tokens.clamp(min=0)[:, None]
    own = logits.gather(1, tokens.long())
    values = torch.cat((own.float(), best), 1) - total[:, None]
    return Logprobs(
        values=values.masked_fill(~finite(logits)[:, None], torch.nan),
        ids=torch.cat((tokens, ids), 1),
        rank=(logits > own).sum(-1, dtype=torch.int32) + 1,
    )


def joined(parts: list[Logprobs]) -> Logprobs:
    """The rows of all parts in order."""
    if len(parts) == 1:
        return parts[0]
    return Logprobs(*(torch.cat([getattr(part, name) for part in parts]) for name in ("values", "ids", "rank")))
