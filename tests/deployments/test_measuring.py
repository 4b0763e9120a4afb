"""Steps are timed without a trace in the pool."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ddtree.deployments.costs import StepCost
from ddtree.deployments.measuring import CHUNK, NODES, measure

from .tiny import Engine, LocalVerifier, make_target


@pytest.mark.timed
@pytest.mark.parametrize(("positions", "largest"), [(512, 128), (100, 64)])
def test_steps_of_all_kinds_are_timed(tmp_path: Path, positions: int, largest: int) -> None:
    verifier = LocalVerifier(make_target(tmp_path), pages=40)
    scheduler = Engine(verifier, max_positions=positions).scheduler
    pool = verifier.target.pool
    before = [part[:, : 39 * verifier.page_size].clone() for part in (pool.k.flatten(1, 2), pool.v.flatten(1, 2))]
    found = list(measure(verifier, scheduler, largest=600))
    after = [part[:, : 39 * verifier.page_size] for part in (pool.k.flatten(1, 2), pool.v.flatten(1, 2))]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True)), (
        "only the scratch page is written"
    )
    assert scheduler.pages.free_pages == scheduler.pages.pages
    sizes = [size for size, _ in found]
    assert all(seconds > 0 for _, seconds in found)
    singles = largest.bit_length()
    wanted = [2**i for i in range(singles)]
    assert [size.rows for size in sizes[:singles]] == wanted, "no longer than the pool or the model has positions"
    most = scheduler.limits.max_sequences
    assert {(size.sequences, size.trees, size.rows) for size in sizes[singles:-2]} == {
        (1, 0, 1), (1, 1, 1 + NODES), (most, 0, most), (most, most, most * (1 + NODES)),
    }  # fmt: skip
    context = min(39 * verifier.page_size, positions) - CHUNK
    assert [(size.rows, size.read) for size in sizes[-2:]] == [(1, context), (CHUNK, context)]
    cost = StepCost(600)
    cost.measured(found)
    assert cost.rows(600) > cost.rows(1) > 0
