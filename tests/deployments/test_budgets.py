"""Trees get as many nodes as pay, batches and sequences no drafts where these do not, and nobody another token for it."""

from __future__ import annotations

from typing import Any

import pytest

from ddtree.deployments.budgets import LOOK, OTHER, Budgets, Promised
from ddtree.deployments.costs import Costs
from ddtree.deployments.pace import Pace

from .tiny import HORIZON, MOST, Engine, Guesser, LocalVerifier, Whims, make_target, plain, request

PROMPTS = [[7 * i % 50 + j for i in range(4)] for j in range(8)]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> LocalVerifier:
    return LocalVerifier(make_target(tmp_path_factory.mktemp("target")), pages=400)


class Fixed(Costs):
    """A machine that is as fast as the test says, whatever the one that runs it does."""

    def __init__(self, step: float, row: float, draft: float, late: float = 0.0) -> None:
        """Seconds of a step of no rows, of each row, of the draft of each sequence, and of choosing nodes after it."""
        super().__init__(rows=1000, sequences=8)
        for rows in (1, 1000):
            self.step.rows.observe(rows, step + rows * row)
        self.seconds, self.late = draft, late

    def draft(self, sequences: int, levels: int) -> float:
        return sequences * self.seconds

    def rest(self, kind: str, sequences: int) -> float:
        return self.late * (kind == "after")

    def observe(self, *_: Any) -> None:
        pass


def test_whims_change_no_token(verifier: LocalVerifier) -> None:
    """Long answers under costs that change every round: contexts are given up and made again, trees cut, batches left without."""
    asked = [request(f"r{i}", prompt, 90, "auto", (0.0, 1.0)[i % 2]) for i, prompt in enumerate(PROMPTS[:4])]
    truth = {r.request_id: plain(verifier, r) for r in asked}
    answers = {r.request_id: [*r.prompt_ids, *truth[r.request_id]] for r in asked}
    turns, seen = {True: 0, False: 0}, {}
    for seed in range(4):
        engine = Engine(verifier, budgets=Budgets(Whims(seed), MOST, HORIZON, thinking=1.0))
        engine.loop.add_drafter(Guesser("d", answers, seed))
        running = [engine.add(r) for r in asked]

        def count(_: int, running: list[Any] = running) -> None:
            for sequence in running:
                if seen.setdefault(id(sequence), True) != sequence.wants_drafter:
                    seen[id(sequence)] = sequence.wants_drafter
                    turns[sequence.wants_drafter] += 1

        engine.run(count)
        engine.check_end(truth, set())
    assert min(turns.values()) > 3


def test_deep_drafts_are_made_where_they_pay(verifier: LocalVerifier) -> None:
    """Two drafters, whose drafts are as deep as what their sequences need; every depth costs something."""

    class Depths(Fixed):
        def draft(self, sequences: int, levels: int) -> float:
            return sequences * levels * self.seconds

    asked = [request(f"r{i}", prompt, 120, "auto") for i, prompt in enumerate(PROMPTS[:2])]
    truth = {r.request_id: plain(verifier, r) for r in asked}
    answers = {r.request_id: [*r.prompt_ids, *truth[r.request_id]] for r in asked}
    for seconds in (1e-6, 0.0008):
        engine = Engine(
            verifier, budgets=Budgets(Depths(step=0.01, row=0.0001, draft=seconds), MOST, HORIZON, thinking=1.0)
        )
        for name in ("one", "other"):
            engine.loop.add_drafter(Guesser(name, answers, 0, errs=0.0))
        running, seen = [engine.add(r) for r in asked], set()
        engine.run(lambda _, running=running, seen=seen: seen.update(s.levels for s in running if s.wants_drafter))
        engine.check_end(truth, set())
        assert (2 in seen) == (seconds > 1e-5)
        assert HORIZON in seen, "now and then, to see what is missed"


def test_who_never_accepts_is_not_drafted_for(verifier: LocalVerifier) -> None:
    asked = [request(name, prompt, 200, "auto") for name, prompt in zip(("good", "bad"), PROMPTS, strict=False)]
    truth = {r.request_id: plain(verifier, r) for r in asked}
    answers = {"good": [*asked[0].prompt_ids, *truth["good"]], "bad": [*asked[1].prompt_ids, *[60] * 220]}
    engine = Engine(verifier, budgets=Budgets(Fixed(step=0.01, row=0.0001, draft=0.001), MOST, HORIZON, thinking=1.0))
    engine.loop.add_drafter(Guesser("d", answers, 0, errs=0.1))
    good, bad = (engine.add(r) for r in asked)
    for _ in range(40):
        engine.loop.run()
    assert good.wants_drafter and good.stats.accepted_tokens > good.stats.rounds
    assert not bad.wants_drafter and bad.nodes == 0
    before = bad.stats.drafted_tokens
    engine.loop.run()
    assert bad.stats.drafted_tokens == before
    engine.run()
    engine.check_end(truth, set())


def test_under_load_nobody_is_drafted_for_and_afterwards_all_are(verifier: LocalVerifier) -> None:
    """Eight rows take as long as one, and more of them soon longer than they are worth."""
    costs = Fixed(step=0.01, row=0.0, draft=0.0005)
    for rows, seconds in ((8, 0.01), (12, 0.02), (16, 0.04), (64, 0.16), (1000, 2.5)):
        for _ in range(200):
            costs.step.rows.observe(rows, seconds)
    asked = [request(f"r{i}", prompt, 260 if i == 0 else 60, "auto") for i, prompt in enumerate(PROMPTS)]
    truth = {r.request_id: plain(verifier, r) for r in asked}
    engine = Engine(verifier, prefill_rows=64, budgets=Budgets(costs, MOST, HORIZON, thinking=1.0))
    engine.loop.add_drafter(
        Guesser("d", {r.request_id: [*r.prompt_ids, *truth[r.request_id]] for r in asked}, 0, errs=0.2)
    )
    running = [engine.add(r) for r in asked]
    for _ in range(20):
        engine.loop.run()
    assert len(engine.scheduler.running) == 8
    assert not any(s.wants_drafter for s in running)
    while len(engine.scheduler.running) > 1:
        engine.loop.run()
    drafted = running[0].stats.drafted_tokens
    for _ in range(40):
        engine.loop.run()
    assert running[0].wants_drafter and running[0].stats.drafted_tokens > drafted
    engine.run()
    engine.check_end(truth, set())


def test_who_comes_after_the_load_is_drafted_for_soon(verifier: LocalVerifier) -> None:
    """A batch without drafts says nothing of one request that comes when it is gone, however short that one is."""
    costs = Fixed(step=0.01, row=0.0, draft=0.0005)
    for rows, seconds in ((8, 0.01), (12, 0.02), (16, 0.04), (64, 0.16), (1000, 2.5)):
        for _ in range(200):
            costs.step.rows.observe(rows, seconds)
    asked = [request(f"r{i}", prompt, 60, "auto") for i, prompt in enumerate(PROMPTS)]
    late = request("late", PROMPTS[3][:3], 12, "auto")
    truth = {r.request_id: plain(verifier, r) for r in [*asked, late]}
    answers = {r.request_id: [*r.prompt_ids, *truth[r.request_id]] for r in [*asked, late]}
    engine = Engine(verifier, prefill_rows=64, budgets=Budgets(costs, MOST, HORIZON, thinking=1.0))
    engine.loop.add_drafter(Guesser("d", answers, 0, errs=0.2))
    running = [engine.add(r) for r in asked]
    for _ in range(20):
        engine.loop.run()
    assert not any(s.wants_drafter for s in running)
    engine.run()
    alone = engine.add(late)
    engine.run()
    assert alone.stats.rounds <= 8, "it has 12 tokens"
    engine.check_end(truth, set())


@pytest.mark.parametrize("late", [0.0, 0.02])
def test_the_forecast_comes_true(verifier: LocalVerifier, late: float) -> None:
    """Within 10 % of what is accepted, although the drafter's own probabilities say nothing here."""
    budgets = Budgets(Fixed(step=0.01, row=0.0001, draft=0.0001, late=late), MOST, HORIZON, thinking=1.0)
    asked = [request(f"r{i}", prompt, 300, "auto", (0.0, 0.8)[i % 2]) for i, prompt in enumerate(PROMPTS[:6])]
    truth = {r.request_id: plain(verifier, r) for r in asked}
    engine = Engine(verifier, prefill_rows=64, budgets=budgets)
    engine.loop.add_drafter(Guesser("d", {r.request_id: [*r.prompt_ids, *truth[r.request_id]] for r in asked}, 0))
    for r in asked:
        engine.add(r)
    for _ in range(40):
        engine.loop.run()
    totals = engine.loop.totals
    forecast, accepted = totals.forecast_tokens, totals.forecast_accepted
    engine.run()
    assert totals.forecast_accepted - accepted > 500
    assert totals.forecast_tokens - forecast == pytest.approx(totals.forecast_accepted - accepted, rel=0.1)


def test_rounds_go_on_when_there_is_no_time_to_think(verifier: LocalVerifier) -> None:
    """With the nodes that were planned while there was some; nothing is looked at any more, and no token changes."""
    asked = [request(f"r{i}", prompt, 250, "auto", (0.0, 0.8)[i % 2]) for i, prompt in enumerate(PROMPTS[:4])]
    truth = {r.request_id: plain(verifier, r) for r in asked}
    answers = {r.request_id: [*r.prompt_ids, *truth[r.request_id]] for r in asked}
    budgets = Budgets(Fixed(step=0.01, row=0.0003, draft=0.0001, late=0.02), MOST, HORIZON, thinking=1.0)
    engine = Engine(verifier, prefill_rows=64, budgets=budgets)
    engine.loop.add_drafter(Guesser("d", answers, 0, errs=0.3))
    running, nodes, noted = [engine.add(r) for r in asked], [], []

    def note(number: int) -> None:
        if number == 2 * OTHER:
            budgets._thinking = Pace(0.0, 0.0)
        if number > 2 * OTHER and not budgets.after:
            noted.append(budgets.notes)
            nodes.extend(s.nodes for s in running if s.decoding and s.wants_drafter)

    engine.run(note)
    engine.check_end(truth, set())
    assert len(noted) > 20 and not any(noted) and min(nodes) > 0


def test_nodes_are_chosen_when_it_takes_less(verifier: LocalVerifier) -> None:
    """After the draft, where that costs nothing; before it, where it costs what two steps do, but for a round now and then."""
    asked = [request(f"r{i}", prompt, 250, "auto", (0.0, 0.8)[i % 2]) for i, prompt in enumerate(PROMPTS[:4])]
    truth = {r.request_id: plain(verifier, r) for r in asked}
    answers = {r.request_id: [*r.prompt_ids, *truth[r.request_id]] for r in asked}
    for late in (0.0, 0.02):
        budgets = Budgets(Fixed(step=0.01, row=0.0003, draft=0.0001, late=late), MOST, HORIZON, thinking=1.0)
        engine = Engine(verifier, prefill_rows=64, budgets=budgets)
        engine.loop.add_drafter(Guesser("d", answers, 0, errs=0.3))
        running, after, sizes = [engine.add(r) for r in asked], [], []

        def note(_: int, budgets=budgets, running=running, after=after, sizes=sizes) -> None:
            after.append(budgets.after)
            sizes.append({s.nodes for s in running if s.record and s.record.planned is not None})

        engine.run(note)
        engine.check_end(truth, set())
        rounds = range(2 * LOOK, len(after) - 1)
        assert len(rounds) > OTHER
        assert [n for n in rounds if after[n] != (not late)] == [n for n in rounds if n % OTHER == 0]
        if late:
            assert any(len(found) > 1 for found in sizes), "who is luckier gets more"


def test_one_look_does_not_decide_how_to_draft() -> None:
    """Four drafts of one sequence may say anything: what many looks say counts, and nothing of another number of sequences."""
    promised = Promised()
    for _ in range(5):
        promised.take([2.0, 3.0])
    promised.take([4.8, 3.2])
    assert promised.mean.argmax() == 1
    for _ in range(20):
        promised.take([4.8, 3.2])
    assert promised.mean.argmax() == 0
    promised.forget()
    promised.take([2.0, 3.0])
    assert promised.mean.tolist() == [2.0, 3.0]
