"""Drafts where a grammar leaves no choice: the tokens it forces take the place of what a drafter guessed. Knows no tree.

As any draft they are only proposed: no token of an answer depends on them.
"""

from __future__ import annotations

import torch

from ddtree.deployments.scheduler import Entry
from ddtree.drafter.items import Candidates


def forced(candidates: Candidates, entries: list[Entry]) -> Candidates:
    """Candidates of the entries, where a grammar forces the first n tokens with these alone at the first n depths; what was
    guessed for those after them stays. Writes to no tensor that it is given."""
    grammars = [(i, entry.sequence.grammar) for i, entry in enumerate(entries)]
    certain = [(i, tokens) for i, grammar in grammars if grammar and (tokens := grammar.forced())]
    if not certain:
        return candidates
    logprobs, ids, below = candidates.logprobs.clone(), candidates.ids.clone(), candidates.conditional
    below = None if below is None else below.clone()
    for i, tokens in certain:
        n = min(len(tokens), ids.shape[1])
        logprobs[i, :n], ids[i, :n] = -torch.inf, -1
        logprobs[i, :n, 0] = 0
        ids[i, :n, 0] = torch.tensor(tokens[:n], dtype=torch.int32).to(ids.device)
        if below is not None:
            below[i, : n - 1] = -torch.inf
            below[i, : n - 1, :, 0] = 0
            below[i, n - 1 : n, 0] = logprobs[i, n : n + 1]  # what came before is another token than was guessed
    return Candidates(logprobs, ids, below)
