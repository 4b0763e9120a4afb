"""Lays out which tokens the grammars of a step's sequences allow, as `TokenMasks`: at every node that the target may reach.

Knows sequences, trees and rows; the grammars themselves are in grammar.py.
"""

from __future__ import annotations

import numpy as np
import torch

from ddtree.deployments.scheduler import Entry
from ddtree.kernels import DraftTree
from ddtree.verifier.batch import TokenMasks


def lay_out_masks(
    entries: list[Entry], offsets: list[int], trees: int, drawn: list[int], tree: DraftTree | None
) -> TokenMasks | None:
    """The first four as `edits.lay_out_edits` takes them; `tree`: of the first `trees` entries, None where each is its root.

    None where no sequence has a grammar, and then nothing waits for the device of the trees; else they are copied from there.
    """
    asking = [i for i in [*range(trees), *drawn] if entries[i].sequence.grammar is not None]
    if not asking:
        return None
    nodes = None if tree is None else torch.stack((tree.tokens, tree.parent)).tolist()
    counts = [] if tree is None else tree.n_nodes.tolist()
    place = {i: offsets[trees] + k for k, i in enumerate(drawn)}  # of a prompt's row among the wanted ones
    masks: dict[bytes, int] = {}  # many nodes have the same one: it travels once
    rows, which = [], []
    for i in asking:
        grammar = entries[i].sequence.grammar
        assert grammar is not None
        drafted = nodes is not None and i < trees
        tokens, parents = [0], [-1]
        if nodes is not None and drafted:
            tokens, parents = (of[i][: counts[i]] for of in nodes)
        for node, mask in grammar.masks(tokens, parents).items():
            rows.append(place.get(i, offsets[i]) + node)
            which.append(masks.setdefault(mask, len(masks)))
    allowed = np.frombuffer(bytearray().join(masks), np.int32).reshape(len(masks), -1)
    return TokenMasks(_int32(rows), _int32(which), torch.from_numpy(allowed))


def _int32(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.int32))
