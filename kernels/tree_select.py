"""Of draft trees the nodes that are worth their time: the checked entry points. Knows no clock and no drafter; what a node
costs is the caller's to say."""

from __future__ import annotations

import torch

from ddtree.kernels.checks import check, check_int32, check_reachable
from ddtree.kernels.dispatch import implementation
from ddtree.kernels.selection import AcceptanceTable, Prices, Selection
from ddtree.kernels.tree import AcceptedPath, DraftTree


def tree_select(tree: DraftTree, table: AcceptanceTable, prices: Prices) -> Selection:
    """Keeps of all trees together the nodes for which expected tokens less what they cost is largest, and cuts the others off.

    All nodes compete in one order: chance of acceptance, no higher than that of the nodes before it in its tree, less its
    tree's price; ties by tree, then by node. The first n of that order are kept, where n is the smallest for which the sum of
    their chances less their prices less cost(n) is largest. Nothing is assumed of the cost's shape. Where a token is worth
    1 / rate seconds, rate being the best that such steps give, this is the choice that gives it (Dinkelbach 1967).

    Args:
        tree: B trees, as `tree_build` made them. Cut in place: `n_nodes`, `first_child` and `next_sibling` change; what lies
            beyond `n_nodes` means nothing afterwards.
        table, prices: what is in `prices` may lie in pinned host memory where the trees are on a GPU.

    Returns:
        Selection. On one device it is exact, given the gains: sums are of whole multiples of `UNIT`. Gains of a GPU and of a
        CPU differ in their last bits.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    device = tree.tokens.device
    _check_table(table, device)
    batch, knots = tree.tokens.shape[0], prices.at.shape[0]
    check_reachable("prices.kind", prices.kind, (batch,), device)
    check_reachable("prices.luck", prices.luck, (batch,), device, torch.float32)
    check_reachable("prices.most", prices.most, (batch,), device)
    check_reachable("prices.price", prices.price, (batch,), device, torch.float64)
    check_reachable("prices.at", prices.at, (knots,), device)
    check_reachable("prices.cost", prices.cost, (knots,), device, torch.float64)
    if not knots:
        raise ValueError("prices.at is empty; say at least what no nodes cost.")
    return implementation(device).tree_select(tree, table, prices)


def tree_learn(table: AcceptanceTable, tree: DraftTree, selection: Selection, accepted: AcceptedPath) -> None:
    """Counts in the table which of the nodes that were kept were accepted, of those whose parents were. In place.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    device = tree.tokens.device
    _check_table(table, device)
    batch, nodes = tree.tokens.shape
    check_int32("selection.cells", selection.cells, (batch, nodes - 1), device)
    check_reachable("accepted.path", accepted.path, (batch, tree.max_depth + 1), device)
    check_reachable("accepted.n_accepted", accepted.n_accepted, (batch,), device)
    implementation(device).tree_learn(table, tree, selection, accepted)


def _check_table(table: AcceptanceTable, device: torch.device) -> None:
    check("table.edges", table.edges, (None,), (torch.float32,), device)
    check("table.cases", table.cases, (None, None, 2, len(table.edges) + 1), (torch.float32,), device)
    check("table.hits", table.hits, tuple(table.cases.shape), (torch.float32,), device)
