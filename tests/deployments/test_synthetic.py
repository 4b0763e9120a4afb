"""Rounds with the synthetic drafter: as much is accepted as was asked for, and no token changes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from ddtree.deployments.requests import Delta
from ddtree.drafter.drafter import Candidates, Drafter
from ddtree.drafter.items import DraftItem
from ddtree.drafter.recordings import Recording, acceptance_by_depth
from ddtree.drafter.synthetic import SyntheticDrafter
from ddtree.verifier.batch import VerifyResult

from .tiny import HORIZON, Engine, LocalVerifier, make_drafter, make_target, request

REQUESTS, TOKENS = 24, 240


class Peer:
    """A drafter in this process."""

    id = "synthetic"

    def __init__(self, drafter: SyntheticDrafter) -> None:
        self.drafter = drafter

    def start(self, items: list[DraftItem], verified: VerifyResult | None) -> None:
        self._candidates: Candidates = self.drafter.draft(items, [verified.features] if verified else [])

    def result(self) -> Candidates:
        return self._candidates

    def release(self, sequences: list[str]) -> None:
        self.drafter.release(sequences)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target = make_target(tmp_path_factory.mktemp("target"))
    return target, make_drafter(tmp_path_factory.mktemp("drafter"))


@pytest.mark.parametrize(("length", "temperature"), [(2.0, 0.0), (3.5, 0.0), (5.0, 0.8), (6.0, 0.0)])
def test_as_much_is_accepted_as_was_asked_for(folders: tuple[Path, Path], length: float, temperature: float) -> None:
    target_dir, drafter_dir = folders
    verifier = LocalVerifier(target_dir, pages=620)
    asked = [request(f"bench-{i}/x", [i, 3, 5 + i], TOKENS, 15, temperature) for i in range(REQUESTS)]
    recorder = Engine(verifier)
    for r in asked:
        recorder.add(dataclasses.replace(r, budget=0))
    recorder.run(limit=3000)
    truth = recorder.output
    recordings = {
        r.request_id.rpartition("/")[0]: Recording(len(r.prompt_ids), tuple(truth[r.request_id])) for r in asked
    }
    real = Drafter(drafter_dir, target_dir, dtype=torch.float32, top_k=8, threads=1)
    engine = Engine(verifier)
    engine.loop.add_drafter(Peer(SyntheticDrafter(real, recordings, acceptance_by_depth(HORIZON, None, length))))
    for r in asked:
        engine.add(r)
    engine.run(limit=3000)
    engine.check_end(truth, set())
    ends = [engine.last[name] for name in truth]
    stats = [end.stats for end in ends if isinstance(end, Delta) and end.stats]
    rounds = sum(s.rounds for s in stats)
    assert (sum(s.accepted_tokens for s in stats) + rounds) / rounds == pytest.approx(length, rel=0.05)
    assert sum(s.fallback_rounds for s in stats) == 0 and real.sequences == 0
