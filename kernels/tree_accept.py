"""Longest path of a draft tree that the target agrees with: the checked entry point. Knows no sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from ddtree.kernels.checks import check_int32, check_reachable
from ddtree.kernels.dispatch import implementation
from ddtree.kernels.reference.tree_accept import walk
from ddtree.kernels.tree import AcceptedPath, DraftTree


def tree_accept(y: Tensor, tree: DraftTree, *, out: AcceptedPath | None = None) -> AcceptedPath:
    """Walks each tree from its root, to the child that carries the target's own token, while there is one.

    Lossless for greedy decoding and for sampling: y is the target's draw, so what is committed is what plain decoding
    would have drawn (SpecInfer, arXiv 2305.09781, section 4.3, with one fixed draw per node).

    Args:
        y: [B, N+1] int32, the target's token at each node. Padding is never read.
        tree: the trees of `tree_build`, on the same device.
        out: where to write, from `AcceptedPath.allocate` of this size; None allocates. For trees on a GPU it may lie in
            pinned host memory; the values are there when the stream is done.

    Returns:
        AcceptedPath with path [B, tree.max_depth + 1], `out` where given.

    Raises:
        ValueError: wrong shape, dtype or device.

    Example:
        With tree 4 → (5 → 7), y = [[5, 7, 9]] gives path [0, 1, 2], n_accepted 3 and bonus 9.
    """
    check_int32("y", y, tuple(tree.tokens.shape), tree.tokens.device)
    if out is not None:
        check_reachable("out.path", out.path, (y.shape[0], tree.max_depth + 1), y.device)
    return implementation(y.device).tree_accept(y, tree, out=out)


def tree_walker(tree: DraftTree) -> Callable[[Iterable[Sequence[int]]], list[list[int]]]:
    """`tree_accept` on the host, made ready before there is a y: what the walks need of the trees is copied there now, which
    waits for their device. So nothing is left to be enqueued, and to be waited for, when y comes.

    What is returned takes the target's token at the first nodes of each tree, as many as it was asked for at, and gives the
    paths; a path ends before a node without one.
    """
    trees = list(zip(tree.tokens.tolist(), tree.first_child.tolist(), tree.next_sibling.tolist(), strict=True))
    return lambda y: [walk(drawn, *links) for drawn, links in zip(y, trees, strict=True)]
