"""Drafts where a grammar leaves no choice: the tokens it forces take the place of what a drafter guessed. Knows no tree.

As any draft they are only proposed: no token of an answer depends on them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.deployments.scheduler import Entry


def forced(candidates: tuple[Tensor, Tensor], entries: list[Entry]) -> tuple[Tensor, Tensor]:
    """log-probs and ids [B, L, K] of the entries, where a grammar forces the first n tokens with these alone at the first n
    depths; what was guessed for those after them stays. Writes to no tensor that it is given."""
    grammars = [(i, entry.sequence.grammar) for i, entry in enumerate(entries)]
    certain = [(i, tokens) for i, grammar in grammars if grammar and (tokens := grammar.forced())]
    if not certain:
        return candidates
    logprobs, ids = (part.clone() for part in candidates)
    for i, tokens in certain:
        n = min(len(tokens), ids.shape[1])
        logprobs[i, :n], ids[i, :n] = -torch.inf, -1
        logprobs[i, :n, 0] = 0
        ids[i, :n, 0] = torch.tensor(tokens[:n], dtype=torch.int32).to(ids.device)
    return logprobs, ids
