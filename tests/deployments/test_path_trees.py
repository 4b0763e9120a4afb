"""Rounds whose candidates depend on those before them: no token changes, and what decides about a tree reaches it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree.deployments import drafts
from ddtree.deployments.budgets import Budgets
from ddtree.deployments.overlap import Mode
from ddtree.deployments.requests import Budget
from ddtree.drafter import noised
from ddtree.drafter.drafter import Drafter
from ddtree.drafter.items import Candidates, DraftItem
from ddtree.drafter.path_head import PathHead
from ddtree.kernels import share_noise
from ddtree.verifier.batch import VerifyResult

from .tiny import (
    HORIZON,
    MOST,
    TOP_K,
    VOCABULARY,
    Engine,
    Guesser,
    LocalVerifier,
    Whims,
    make_drafter,
    make_target,
    plain,
    request,
)

RANK, HIDDEN = 4, 32
tokens = st.integers(0, VOCABULARY - 1)
requests = st.lists(
    st.tuples(
        st.lists(tokens, min_size=1, max_size=20),
        st.integers(1, 12),  # max_tokens
        st.sampled_from([0, 1, 3, 7, 15, "auto"]),  # budget
        st.sampled_from([0.0, 0.7, 1.5]),  # temperature
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> LocalVerifier:
    return LocalVerifier(make_target(tmp_path_factory.mktemp("target")))


class PathGuesser(Guesser):
    """Makes up how likely candidates are after each other."""

    def result(self) -> Candidates:
        found = super().result()
        batch, levels, k = found.ids.shape
        rows = torch.randn(batch, 1 + (levels - 1) * k, k, generator=self._random).mul(2).log_softmax(-1)
        first = torch.cat((rows[:, :1], found.logprobs[:, 1:]), 1)
        return Candidates(first, found.ids, rows[:, 1:].reshape(batch, levels - 1, k, k))


@given(requests, st.integers(0, 1000), st.sampled_from(["off", "on"]), st.integers(0, 8), st.booleans())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_output_is_plain_decoding(
    verifier: LocalVerifier,
    wanted: list[tuple[list[int], int, Budget, float]],
    seed: int,
    overlap: Mode,
    joins: int,
    of_one_kind: bool,
) -> None:
    """Though a drafter of another kind joins, and one dies."""
    asked = [request(f"r{i}", p, n, b, t) for i, (p, n, b, t) in enumerate(wanted)]
    truth = {r.request_id: plain(verifier, r) for r in asked}
    answers = {r.request_id: [*r.prompt_ids, *truth[r.request_id]] for r in asked}
    engine = Engine(verifier, overlap=overlap, budgets=Budgets(Whims(seed), MOST, HORIZON))
    first = PathGuesser("first", answers, seed)
    engine.loop.add_drafter(first)
    for r in asked:
        engine.add(r)

    def between(i: int) -> None:
        if i == joins:
            engine.loop.add_drafter((PathGuesser if of_one_kind else Guesser)("late", answers, seed + 1))
        first.dead = i > joins + 3

    engine.run(between)
    engine.check_end(truth, set())


class Peer:
    """A drafter in this process."""

    id = "drafter"

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.seen: list[Candidates] = []

    def start(self, items: list[DraftItem], verified: VerifyResult | None) -> None:
        self._candidates = self.drafter.draft(items, [verified.features] if verified else [])

    def result(self) -> Candidates:
        self.seen.append(self._candidates)
        return self._candidates

    def release(self, sequences: list[str]) -> None:
        self.drafter.release(sequences)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_target(tmp_path_factory.mktemp("target")), make_drafter(tmp_path_factory.mktemp("drafter"))


def random_head() -> PathHead:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "markov_w1.weight": (VOCABULARY, RANK),
        "markov_w2.weight": (VOCABULARY, RANK),
        "gate.weight": (RANK, HIDDEN),
    }
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return PathHead(tensors, vocab_size=VOCABULARY, hidden_size=HIDDEN)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_real_drafter_with_a_head_changes_no_token(
    folders: tuple[Path, Path], temperature: float, tmp_path: Path
) -> None:
    target_dir, _ = folders
    with_head = make_drafter(tmp_path)
    random_head().save(with_head)
    verifier = LocalVerifier(target_dir, pages=200)
    asked = [request(f"r{i}", [i, 3, 5 + i], 30, (7, 15, 40)[i % 3], temperature) for i in range(6)]
    truth = {r.request_id: plain(verifier, r) for r in asked}
    engine, peer = Engine(verifier), Peer(Drafter(with_head, target_dir, dtype=torch.float32, top_k=TOP_K, threads=1))
    engine.loop.add_drafter(peer)
    for r in asked:
        engine.add(r)
    engine.run()
    engine.check_end(truth, set())
    assert all(each.conditional is not None for each in peer.seen if len(each.ids))


def test_a_checkpoint_without_a_head_grows_trees_as_ever(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("these candidates depend on no path")

    monkeypatch.setattr(drafts, "tree_build_path", never)
    monkeypatch.setattr(noised, "share_noise_path", never)
    target_dir, drafter_dir = folders
    verifier = LocalVerifier(target_dir, pages=200)
    asked = [request(f"r{i}", [i, 3, 5 + i], 20, 15, 0.9 * (i % 2)) for i in range(4)]
    truth = {r.request_id: plain(verifier, r) for r in asked}
    engine, peer = Engine(verifier), Peer(Drafter(drafter_dir, target_dir, dtype=torch.float32, top_k=TOP_K, threads=1))
    engine.loop.add_drafter(peer)
    for r in asked:
        engine.add(r)
    engine.run()
    engine.check_end(truth, set())
    assert peer.seen and all(each.conditional is None for each in peer.seen)
    assert engine.loop._candidates == (HORIZON, TOP_K), "so the next call of tree_build is made ready"


class Follower(PathGuesser):
    """Says of each candidate that it follows the one that it does follow, where both are of the answer."""

    def __init__(self, *arguments: object, tells: bool) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self._tells = tells

    def result(self) -> Candidates:
        found = Guesser.result(self)
        truth = torch.full(found.ids.shape[:2], -1)
        for row, item in enumerate(self._items):
            coming = self._answers[item.sequence][item.position + 1 :][: truth.shape[1]]
            truth[row, : len(coming)] = torch.tensor(coming)
        right = found.ids == truth[..., None]
        flat = torch.zeros(found.ids.shape).log_softmax(-1)
        known = (4.0 * right).log_softmax(-1) if self._tells else flat
        below = torch.where(right[:, :-1, :, None], known[:, 1:, None], flat[:, 1:, None])
        return Candidates(torch.cat((known[:, :1], flat[:, 1:]), 1), found.ids, below.contiguous())


def test_what_candidates_say_of_paths_decides_what_is_proposed(verifier: LocalVerifier) -> None:
    asked = [request(f"r{i}", [i, 1, 4], 40, budget=4) for i in range(4)]
    truth = {r.request_id: plain(verifier, r) for r in asked}
    answers = {r.request_id: [*r.prompt_ids, *truth[r.request_id]] for r in asked}
    accepted = []
    for tells in (True, False):
        engine = Engine(verifier)
        engine.loop.add_drafter(Follower("d", answers, 0, 0.1, tells=tells))
        for r in asked:
            engine.add(r)
        engine.run()
        engine.check_end(truth, set())
        accepted.append(engine.loop.totals.accepted_tokens)
    assert accepted[0] > 1.4 * accepted[1] > 0


@pytest.mark.parametrize("make", [Guesser, PathGuesser])
def test_noise_is_shared_where_paths_count_too(verifier: LocalVerifier, make: Callable[..., Guesser]) -> None:
    asked = [request(f"shared {i}", [i, 9, 2], 24, budget=3, temperature=1.0) for i in range(8)]
    truth = {r.request_id: plain(verifier, r) for r in asked}
    answers = {r.request_id: [*r.prompt_ids, *truth[r.request_id]] for r in asked}
    accepted = []
    for shared in (True, False):
        engine = Engine(verifier, shared_noise=shared)
        engine.loop.add_drafter(make("d", answers, 3, errs=0.1))
        for r in asked:
            engine.add(r)
        engine.run()
        engine.check_end(truth, set())
        accepted.append(engine.loop.totals.accepted_tokens)
    assert accepted[0] > 1.1 * accepted[1] > 0


def numbers(batch: int) -> tuple[Tensor, ...]:
    return (
        torch.zeros(batch, dtype=torch.int32),
        torch.full((batch,), 9, dtype=torch.int32),
        torch.full((batch,), 15).int(),
    )


def candidates(batch: int, levels: int, k: int, conditional: bool) -> Candidates:
    torch.manual_seed(batch)
    logprobs = torch.randn(batch, levels, k).log_softmax(-1).sort(-1, descending=True).values
    ids = torch.arange(k, dtype=torch.int32).expand(batch, levels, k)
    return Candidates(logprobs, ids, torch.randn(batch, levels - 1, k, k).log_softmax(-1) if conditional else None)


def test_candidates_with_and_without_paths_make_one_batch() -> None:
    """Of drafts with few depths and with all, some trees without any; each grows the tree that it would alone."""
    parts = [
        ([3, 0], candidates(2, 3, 4, True)),
        ([2], candidates(1, 5, 4, False)),
        ([4], candidates(3, 1, 4, True).first(1)),
    ]
    whole = drafts.deepened(drafts.joined(parts, 5, torch.device("cpu")), 6)
    assert whole.conditional is not None and whole.conditional.shape == (5, 5, 4, 4)
    tree = drafts.grown(whole, numbers(5), 15, None)
    assert tree.n_nodes[1] == 1 and tree.max_depth == 6
    for rows, part in parts:
        alone = drafts.grown(part, numbers(len(rows)), 15, None)
        for i, row in enumerate(rows):
            for name in ("tokens", "parent", "score", "n_nodes", "ancestors"):
                assert torch.equal(getattr(tree, name)[row], getattr(alone, name)[i]), name


def test_noise_is_that_of_candidates_without_paths() -> None:
    plain_ = candidates(2, 4, 5, False)
    repeated = plain_.logprobs[:, 1:, None].expand(-1, -1, 5, -1)
    draws = torch.tensor([7, 8]), torch.tensor([3, 99], dtype=torch.int32), torch.tensor([0.0, 0.8])
    found = noised.noised(replace(plain_, conditional=repeated), *draws)
    root, _, budget = numbers(2)
    by_path = drafts.grown(found, (root, draws[1], budget), 15, None)
    logprobs, ids = share_noise(plain_.logprobs, plain_.ids, *draws)
    expected = drafts.grown(Candidates(logprobs, ids), (root, draws[1], budget), 15, None)
    assert torch.equal(by_path.tokens, expected.tokens) and torch.equal(by_path.parent, expected.parent)
    torch.testing.assert_close(by_path.score, expected.score, atol=1e-5, rtol=1e-5)
