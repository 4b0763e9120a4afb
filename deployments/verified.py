"""What a round verified of one sequence, on the host, for requests that ask for it. Knows trees; knows no rounds and no text."""

from __future__ import annotations

import numpy as np
import torch

from ddtree.deployments.requests import VerifiedRound
from ddtree.kernels import DraftTree


def verified(
    tree: DraftTree | None, i: int, budget: int, root: int, path: list[int], bonus: int, seconds: dict[str, float]
) -> VerifiedRound:
    """Of a sequence that decodes: tree `i` of these with so many nodes below its root, and the accepted path, root included. None
    where nothing was drafted. Waits for the tree's device, and copies this one tree."""
    rows = np.array([[root], [-1], [0]], np.int32)
    if tree is not None:
        fields = (tree.tokens, tree.parent, tree.score.view(torch.int32))
        rows = torch.stack([field[i, : budget + 1] for field in fields]).cpu().numpy()
        rows = rows[:, : 1 + np.count_nonzero(rows[1] >= 0)]  # it may have fewer nodes than it was given
    tokens, parents, scores = rows[0].tolist(), rows[1].tolist(), rows[2].view(np.float32).tolist()
    return VerifiedRound(budget, tuple(tokens), tuple(parents), tuple(scores), tuple(path[1:]), bonus, dict(seconds))


def of_prompt(token: int, seconds: dict[str, float]) -> VerifiedRound:
    """Of a sequence whose prompt ended, and gave this token."""
    return VerifiedRound(0, (), (), (), (), token, dict(seconds))
