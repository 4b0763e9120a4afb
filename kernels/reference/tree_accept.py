"""Definition of `tree_accept`: a walk over child links, on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ddtree.kernels.tree import AcceptedPath, DraftTree, into


def tree_walker(tree: DraftTree, out: AcceptedPath) -> Callable[[Tensor], AcceptedPath]:
    return lambda y: tree_accept(y, tree, out=out)


def tree_accept(y: Tensor, tree: DraftTree, *, out: AcceptedPath | None = None) -> AcceptedPath:
    paths, lengths, bonuses = [], [], []
    for drawn, tokens, first_child, next_sibling in zip(
        y.tolist(), tree.tokens.tolist(), tree.first_child.tolist(), tree.next_sibling.tolist(), strict=True
    ):
        path, child = [0], first_child[0]
        while child >= 0:  # links never lead into padding, so no token is compared with it
            if tokens[child] == drawn[path[-1]]:
                path.append(child)
                child = first_child[child]
            else:
                child = next_sibling[child]
        lengths.append(len(path))
        bonuses.append(drawn[path[-1]])
        paths.append(path + [-1] * (tree.max_depth + 1 - len(path)))

    def int32(values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=y.device)

    accepted = AcceptedPath(
        path=int32(paths).view(len(lengths), tree.max_depth + 1), n_accepted=int32(lengths), bonus=int32(bonuses)
    )
    return into(out, accepted)
