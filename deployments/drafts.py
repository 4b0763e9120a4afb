"""The candidates of a round on their way to its trees: joined, made as deep as wanted, grown into trees.

Where a drafter says how likely each candidate is after each of the depth before (`Candidates.conditional`), so do the trees: the
same is done to these rows, and they are what trees grow from. Knows no peers and no requests.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ddtree.drafter.items import Candidates
from ddtree.kernels import DraftTree, tree_build, tree_build_path


def joined(found: list[tuple[list[int], Candidates]], trees: int, device: torch.device) -> Candidates:
    """One row for each of so many trees. `found`: candidates of drafters, and the trees that their rows are of; other trees have
    none."""
    if len(found) == 1 and len(found[0][0]) == trees:
        return _on(found[0][1], device)
    parts = [(torch.tensor(rows, device=device), _on(part, device)) for rows, part in found]
    levels, k = max(part.ids.shape[1] for _, part in parts), parts[0][1].ids.shape[2]
    logprobs = torch.full((trees, levels, k), -torch.inf, device=device)
    ids = torch.full(logprobs.shape, -1, dtype=torch.int32, device=device)
    for at, part in parts:
        own = part.ids.shape[1]
        logprobs[at, :own], ids[at, :own] = part.logprobs, part.ids
    if all(part.conditional is None for _, part in parts):
        return Candidates(logprobs, ids)
    conditional = torch.full((trees, levels - 1, k, k), -torch.inf, device=device)
    for at, part in parts:
        below = part.logprobs[:, 1:, None] if part.conditional is None else part.conditional
        conditional[at, : part.ids.shape[1] - 1] = below.expand(-1, -1, k, -1)
    return Candidates(logprobs, ids, conditional)


def _on(candidates: Candidates, device: torch.device) -> Candidates:
    below = candidates.conditional
    return Candidates(
        candidates.logprobs.to(device), candidates.ids.to(device), None if below is None else below.to(device)
    )


def deepened(candidates: Candidates, levels: int) -> Candidates:
    """With so many depths, the last of which may have no candidates."""
    missing, below = levels - candidates.ids.shape[1], candidates.conditional
    if not missing:
        return candidates
    return Candidates(
        pad(candidates.logprobs, (0, 0, 0, missing), value=-torch.inf),
        pad(candidates.ids, (0, 0, 0, missing), value=-1),
        None if below is None else pad(below, (0, 0, 0, 0, 0, missing), value=-torch.inf),
    )


def grown(candidates: Candidates, numbers: tuple[Tensor, ...], max_budget: int, out: DraftTree | None) -> DraftTree:
    """Trees of root, seq_len and budget [B] = `numbers`."""
    root, seq_len, budget = numbers
    if candidates.conditional is None:
        return tree_build(candidates.logprobs, candidates.ids, root, seq_len, budget, max_budget=max_budget, out=out)
    first = candidates.logprobs[:, 0]
    return tree_build_path(
        first, candidates.conditional, candidates.ids, root, seq_len, budget, max_budget=max_budget, out=out
    )
