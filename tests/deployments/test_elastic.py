"""Drafters that come and go while sequences run: who drafts for whom, what a move costs, and no token that depends on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from ray.serve.config import AutoscalingConfig

from ddtree.deployments.autoscaling import BUSY_SHARE, SEQUENCES, BusyShare, LoadMeter
from ddtree.deployments.requests import GenerationRequest

from .tiny import Engine, Guesser, LocalVerifier, make_target, plain, request

STREAMS, TOKENS, ROWS = 8, 60, 16  # rows: prompt rows a step, room for the window of two sequences
ASKED = [request(f"r{i}", [i, 3 + i, 5, 7], TOKENS, 7, 0.8 * (i % 2)) for i in range(STREAMS)]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> LocalVerifier:
    return LocalVerifier(make_target(tmp_path_factory.mktemp("target")), pages=300)


@pytest.fixture(scope="module")
def truth(verifier: LocalVerifier) -> dict[str, list[int]]:
    return {r.request_id: plain(verifier, r) for r in ASKED}


class Crowd:
    """Streams with a budget, and drafters that know their answers."""

    def __init__(self, verifier: LocalVerifier, truth: dict[str, list[int]], streams: int = STREAMS) -> None:
        self.truth = {r.request_id: truth[r.request_id] for r in ASKED[:streams]}
        self.answers = {r.request_id: [*r.prompt_ids, *truth[r.request_id]] for r in ASKED}
        self.engine = Engine(verifier, prefill_rows=ROWS)
        self.join("first")
        for r in ASKED[:streams]:
            self.engine.add(r)

    def join(self, name: str) -> Guesser:
        drafter = Guesser(name, self.answers, seed=1)
        self.engine.loop.add_drafter(drafter)
        return drafter

    def late(self, verifier: LocalVerifier, prompt: list[int], tokens: int) -> GenerationRequest:
        """One request more, for a test to add."""
        asked = request("late", prompt, tokens, 7)
        self.truth["late"] = plain(verifier, asked)
        self.answers["late"] = [*prompt, *self.truth["late"]]
        return asked

    def load(self) -> Counter[str | None]:
        return Counter(sequence.drafter for sequence in self.engine.scheduler.running)

    def run(self, happenings: dict[int, Callable[[], object]], *, steady: bool = True) -> None:
        """To the end; what happens before a round is given by its number. `steady`: every round brings every stream a token."""
        running = self.engine.scheduler.running
        before: dict[str, int] = {}

        def between(i: int) -> None:
            slow = [s.id for s in running if s.generated and s.generated == before.get(s.id)]
            assert not (steady and slow), f"round {i - 1} brought {slow} no token"
            before.update({s.id: s.generated for s in running})
            happenings.get(i, lambda: None)()

        self.engine.run(between)
        self.engine.check_end(self.truth, set())

    def fallbacks(self) -> int:
        return self.engine.loop.totals.fallbacks


@pytest.fixture
def crowd(verifier: LocalVerifier, truth: dict[str, list[int]]) -> Crowd:
    return Crowd(verifier, truth)


def test_a_drafter_that_joins_gets_its_share_of_the_running_sequences(crowd: Crowd) -> None:
    loads: list[Counter[str | None]] = []
    watch = {i: lambda: loads.append(crowd.load()) for i in range(9, 14)}
    crowd.run({8: lambda: crowd.join("second"), **watch})
    assert loads[-1] == {"first": 4, "second": 4}
    totals = crowd.engine.loop.totals
    assert 4 <= totals.moves <= 8 and totals.moved_rows <= 7 * totals.moves, "a window of 6, and the token after it"
    assert crowd.fallbacks() == 0, "a sequence that moves has its window computed in that round, and drafts in the next"


def test_a_drafter_that_leaves_drafts_until_others_have_its_sequences(crowd: Crowd) -> None:
    gone: list[bool] = []
    at_the_end: list[bool] = []
    second = crowd.join("second")

    def leave() -> None:
        assert crowd.load()["second"] == 4
        crowd.engine.loop.retire_drafter("second", lambda: gone.append(True))

    def check() -> None:
        at_the_end.extend([gone == [True], crowd.load() == {"first": len(crowd.engine.scheduler.running)}])

    crowd.run({8: leave, 13: check})
    assert at_the_end == [True, True] and not second.ends, "it holds no context any more"
    assert crowd.fallbacks() == 0


def test_the_last_drafter_leaves_at_once(crowd: Crowd) -> None:
    gone: list[bool] = []
    crowd.run(
        {
            8: lambda: crowd.engine.loop.retire_drafter("first", lambda: gone.append(True)),
            10: lambda: gone.append(bool(crowd.engine.loop.drafters)),
            12: lambda: crowd.join("another"),
        }
    )
    assert gone == [True, False]
    assert crowd.engine.loop.totals.moves == STREAMS, "they went over to the one that came"


def test_a_drafter_that_dies_while_it_leaves_is_gone(crowd: Crowd) -> None:
    gone: list[bool] = []
    second = crowd.join("second")

    def leave_and_die() -> None:
        crowd.engine.loop.retire_drafter("second", lambda: gone.append(True))
        second.dead = True

    crowd.run({8: leave_and_die})
    assert gone == [True]
    crowd.engine.loop.retire_drafter("second", lambda: gone.append(False))
    assert gone == [True, False], "one that is not known is gone already"


def test_no_drafter_keeps_the_context_of_what_went_elsewhere(crowd: Crowd, verifier: LocalVerifier) -> None:
    """Through moves, and a verifier that is lost with all KV rows."""
    drafters = [crowd.join("second")]

    def join() -> None:
        drafters.append(crowd.join(f"late{len(drafters)}"))

    def lose() -> None:
        verifier.fail_next = True

    crowd.run({8: join, 12: lose, 14: join}, steady=False)
    assert [drafter.ends for drafter in drafters] == [{}] * 3


def test_who_waits_has_no_drafter_that_could_leave_meanwhile(crowd: Crowd, verifier: LocalVerifier) -> None:
    late = crowd.engine.add(crowd.late(verifier, [9, 9, 9], 10))
    crowd.run({4: lambda: crowd.join("second"), 5: lambda: crowd.engine.loop.forget_drafter("first", "it left")})
    assert late.stats.accepted_tokens > 0 and late.stats.fallback_rounds == 0


def test_moves_do_not_hold_up_a_prompt(verifier: LocalVerifier, truth: dict[str, list[int]]) -> None:
    """It takes all prompt rows of twelve steps."""
    crowd = Crowd(verifier, truth, STREAMS - 1)
    seen: list[tuple[int, int]] = []
    totals = crowd.engine.loop.totals
    asked = crowd.late(verifier, [i % 50 for i in range(12 * ROWS)], 3)

    def begin() -> None:
        long = crowd.engine.add(asked)
        crowd.join("second")
        happenings[18] = lambda: seen.append((long.computed, totals.moves))

    happenings: dict[int, Callable[[], object]] = {8: begin}
    crowd.run(happenings)
    assert seen == [(10 * ROWS, 0)]
    assert totals.moves > 0, "they were made when it was done"


class Context:
    """What a policy reads of Serve's AutoscalingContext."""

    def __init__(self, shares: list[float] | None, replicas: int) -> None:
        self.aggregated_metrics = {} if shares is None else {BUSY_SHARE: dict(enumerate(shares))}
        self.current_num_replicas = self.target_num_replicas = replicas


@pytest.mark.parametrize(
    ("shares", "replicas", "wanted"),
    [([0.9], 1, 1.8), ([0.8, 0.7], 2, 3.0), ([0.1, 0.1, 0.1], 3, 0.6), ([1.0], 2, 4.0), (None, 3, 3)],
)
def test_the_policy_keeps_drafters_busy_for_their_share(
    shares: list[float] | None, replicas: int, wanted: float
) -> None:
    number, _ = BusyShare(0.5)(Context(shares, replicas))  # type: ignore[arg-type]
    assert number == pytest.approx(wanted)


def test_serve_makes_the_policy_from_what_a_file_says() -> None:
    said = {"policy_function": "ddtree.deployments.autoscaling:BusyShare", "policy_kwargs": {"target": 0.25}}
    policy = AutoscalingConfig(max_replicas=4, policy=said).policy
    number, _ = policy.get_policy()(**policy.policy_kwargs)(Context([0.5], 1))
    assert number == pytest.approx(2)


@pytest.mark.parametrize("target", [0, -1, 1.1])
def test_a_share_that_makes_no_sense_is_refused(target: float) -> None:
    with pytest.raises(ValueError, match=r"policy_kwargs.target .* above 0, at most 1"):
        BusyShare(target)


def test_the_meter_reports_the_time_since_the_last_report(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 102.0, 104.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    meter = LoadMeter()
    assert meter.report(7.0, 3) == {SEQUENCES: 3.0, BUSY_SHARE: 0.0}, "loading does not count"
    assert meter.report(8.0, 4) == {SEQUENCES: 4.0, BUSY_SHARE: 0.5}
    assert meter.report(10.5, 0) == {SEQUENCES: 0.0, BUSY_SHARE: 1.0}
