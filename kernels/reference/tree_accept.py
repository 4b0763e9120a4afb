"""Definition of `tree_accept`: a walk over child links, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddtree.kernels.tree import AcceptedPath, DraftTree, into


def walk(
    drawn: Sequence[int], tokens: Sequence[int], first_child: Sequence[int], next_sibling: Sequence[int]
) -> list[int]:
    """The path down one tree whose first nodes have these tokens of the target; it ends before a node that has none."""
    path, child, known = [0], first_child[0], len(drawn)
    while 0 <= child < known:  # links never lead into padding, so no token is compared with it
        if tokens[child] == drawn[path[-1]]:
            path.append(child)
            child = first_child[child]
        else:
            child = next_sibling[child]
    return path


def tree_accept(y: Tensor, tree: DraftTree, *, out: AcceptedPath | None = None) -> AcceptedPath:
    paths, lengths, bonuses = [], [], []
    for drawn, *links in zip(
        y.tolist(), tree.tokens.tolist(), tree.first_child.tolist(), tree.next_sibling.tolist(), strict=True
    ):
        path = walk(drawn, *links)
        lengths.append(len(path))
        bonuses.append(drawn[path[-1]])
        paths.append(path + [-1] * (tree.max_depth + 1 - len(path)))

    def int32(values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=y.device)

    accepted = AcceptedPath(
        path=int32(paths).view(len(lengths), tree.max_depth + 1), n_accepted=int32(lengths), bonus=int32(bonuses)
    )
    return into(out, accepted)
