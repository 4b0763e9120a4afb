"""Rounds that are told say what happened: tokens are those of the accepted path and the bonus, nodes those that were verified."""

from __future__ import annotations

import dataclasses

import pytest

from ddtree.deployments.budgets import Budgets
from ddtree.deployments.overlap import Mode
from ddtree.deployments.requests import Budget, Delta, VerifiedRound
from ddtree.deployments.sequence import Sequence

from .tiny import HORIZON, MOST, Engine, Guesser, LocalVerifier, Whims, make_target, plain, request

PROMPT = [7, 3, 11, 5, 2, 30, 8, 9]
LENGTH = 24


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> LocalVerifier:
    return LocalVerifier(make_target(tmp_path_factory.mktemp("target")))


class Listener(Engine):
    """Keeps every delta."""

    def _emit(self, outgoing: list[tuple[Sequence, Delta | Exception]]) -> None:
        self.deltas: list[tuple[str, Delta]] = getattr(self, "deltas", [])
        self.deltas += [(sequence.id, delta) for sequence, delta in outgoing if isinstance(delta, Delta)]
        super()._emit(outgoing)


def tokens_of(told: VerifiedRound) -> tuple[int, ...]:
    return (*(told.tokens[node] for node in told.accepted), *([] if told.bonus is None else [told.bonus]))


def check(told: VerifiedRound) -> None:
    """It is a tree, no larger than it may be, and the accepted nodes are a path from its root."""
    assert len(told.tokens) == len(told.parents) == len(told.scores) <= told.budget + 1
    for node, parent in enumerate(told.parents):
        assert -1 <= parent < node and (parent == -1) == (node == 0)
        assert node == 0 or told.scores[node] <= told.scores[parent] <= 0
    at = 0
    for node in told.accepted:
        assert told.parents[node] == at
        at = node


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("budget", [0, 5, 20, "auto"])
def test_rounds_are_the_answer(verifier: LocalVerifier, budget: Budget, overlap: Mode) -> None:
    names = ["listens", "does not", "listens too"]
    asked = [request(name, PROMPT[: 4 + i], LENGTH, budget, 0.7 * (i == 2)) for i, name in enumerate(names)]
    asked = [dataclasses.replace(r, tells_rounds=r.request_id.startswith("listens")) for r in asked]
    truth = {r.request_id: plain(verifier, r) for r in asked}
    engine = Listener(verifier, overlap=overlap, budgets=Budgets(Whims(3), MOST, HORIZON))
    engine.loop.add_drafter(Guesser("d", {r.request_id: [*r.prompt_ids, *truth[r.request_id]] for r in asked}, 0))
    for one in asked:
        engine.add(one)
    engine.run_over_a_death(at=4)
    engine.check_end(truth, set())

    for name, delta in engine.deltas:
        if name == "does not":
            assert delta.round is None
        else:
            assert delta.round
            assert tokens_of(delta.round) == delta.token_ids
            check(delta.round)
            assert set(delta.round.seconds) == {"draft", "build", "verify", "accept", "commit"}
    told = [delta.round for _, delta in engine.deltas if delta.round]
    assert {len(r.tokens) for r in told if not r.budget} <= {0, 1}, "without a draft there is the root alone"
    assert any(not r.tokens for r in told), "of the prompts"
    assert any(r.accepted for r in told) == (budget != 0)
    most = MOST if budget == "auto" else budget
    assert max(r.budget for r in told) <= most and (budget in (0, "auto") or max(r.budget for r in told) == most)


def test_a_round_ends_with_the_answer(verifier: LocalVerifier) -> None:
    """However far into a path the limit is."""
    whole = plain(verifier, request("all", PROMPT, 12, 0))
    for length in range(2, 10):
        engine = Listener(verifier)
        engine.loop.add_drafter(Guesser("d", {"all": [*PROMPT, *whole]}, 0, errs=0))
        engine.add(dataclasses.replace(request("all", PROMPT, length, 20), tells_rounds=True))
        engine.run()
        last = engine.deltas[-1][1]
        assert last.round and tokens_of(last.round) == last.token_ids
        assert engine.output["all"] == whole[:length]


def test_what_of_a_round_is_within_an_answer() -> None:
    told = VerifiedRound(3, (1, 2, 3, 4), (-1, 0, 1, 0), (0.0, -0.1, -0.3, -2.0), (1, 2), 9, {})
    assert told.within(3) is told
    assert [tokens_of(told.within(n)) for n in range(4)] == [(), (2,), (2, 3), (2, 3, 9)]
