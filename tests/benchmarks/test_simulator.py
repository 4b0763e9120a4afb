"""The simulator: against closed forms, the service's own scheduler and plan; its check, against a service in this process."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulator import __main__ as command
from benchmarks.simulator import check, measure, paper, report
from benchmarks.simulator.choice import Choice, Draws
from benchmarks.simulator.figures import Figures, summary
from benchmarks.simulator.load import Lengths, Poisson, Streams, Tokens
from benchmarks.simulator.pod import Pod, Stream
from benchmarks.simulator.processes import NEVER, Drafter, Failures, Process
from benchmarks.simulator.profile import Acceptance, Limits, Profile, StageCosts
from benchmarks.simulator.simulation import Deployment, MakeLoad, simulate
from ddtree.deployments.assignment import assign
from ddtree.deployments.commands.plan import make_plan
from ddtree.deployments.config import load as load_config
from ddtree.deployments.costs import StepSize
from ddtree.deployments.requests import GenerationRequest
from ddtree.deployments.round_curve import size_of
from ddtree.deployments.scheduler import Limits as SchedulerLimits
from ddtree.deployments.scheduler import Scheduler
from ddtree.deployments.sequence import Sequence
from ddtree.verifier.pages import PageAllocator

from ..deployments.api.served import ByName, LocalEngine, serving
from ..deployments.tiny import Guesser

KIMI = Path(__file__).parents[2] / "configs" / "kimi-k2.6-8gpu.yaml"
COSTS = StageCosts(step=[(1, 0.021), (2, 0.022)], draft=[(1, 0.01), (2, 0.012)], rest=[(1, 0.002)], per_sequence=0.001)
THREE = Acceptance({4: [0, 0, 0, 1]})  # always three draft tokens
MIXED = Acceptance({4: [0.3, 0.3, 0.2, 0.1, 0.1], 16: [0.2, 0.2, 0.2, 0.2, 0.1, 0.1]})
SERVICE = Profile("tiny", "made up", COSTS, THREE, budget=4)


def streams(requests: Iterable[Tokens], number: int, seconds: float = float("inf")) -> MakeLoad:
    return lambda random: Streams(requests, number, seconds)


def poisson(lengths: Lengths, rate: float, seconds: float) -> MakeLoad:
    return lambda random: Poisson(lengths.draw(random), rate, seconds, random)


def speed(profile: Profile, deployment: Deployment, number: int, seconds: float = 100.0, seed: int = 0) -> float:
    """Tokens per second under so many streams."""

    def load(random: np.random.Generator) -> Streams:
        return Streams(Lengths(20, 100, 0.5).draw(random), number, seconds)

    figures = simulate(profile, deployment, load, begin=0.1 * seconds, end=seconds, seed=seed)
    return summary([figures], deployment.pods, deployment.drafters).tokens_per_s


def make_pod(profile: Profile, drafters: int = 1) -> Pod:
    """With a verifier and drafters that last."""
    seeds = np.random.SeedSequence(0).spawn(2 + drafters)
    kept = [Drafter(NEVER, seed) for seed in seeds[2:]]
    return Pod(profile, Choice(profile), Draws(profile, seeds[0]), Process(NEVER, seeds[1]), kept, Figures())


# -- closed forms --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 7, 100])
def test_one_stream_takes_exactly_its_rounds(rounds: int) -> None:
    figures = simulate(SERVICE, Deployment(), streams([(10, 1 + 4 * rounds)], 1))
    prompt, each = 0.002 + 0.030, 0.010 + 0.002 + 0.025
    assert figures.last == pytest.approx(prompt + rounds * each, rel=1e-12)
    found = summary([figures], 1, 1)
    assert found.tokens_per_s == pytest.approx((1 + 4 * rounds) / figures.last)
    assert found.ttft_p50_s == found.ttft_p99_s == pytest.approx(prompt)
    assert found.gap_p50_s == pytest.approx(each) and found.token_p50_s == pytest.approx(each / 4)
    assert found.pod_busy == pytest.approx(1) and found.drafter_busy == pytest.approx(rounds * 0.010 / figures.last)


def test_a_drafter_is_an_m_d_1_queue() -> None:
    service, load = 0.01, 0.7
    drafter, random = Drafter(NEVER, np.random.SeedSequence(0)), np.random.default_rng(1)
    calls = np.cumsum(random.exponential(service / load, 300_000)).tolist()
    waits = [drafter.draft(now, service)[0] - now - service for now in calls]
    assert np.mean(waits) == pytest.approx(load * service / (2 * (1 - load)), rel=0.03)


def test_only_requests_of_the_window_count() -> None:
    each = 0.032 + 7 * 0.037
    figures = simulate(SERVICE, Deployment(), streams([(10, 29)] * 10, 1), begin=2.5 * each, end=5.5 * each)
    first, _, token = figures.times()
    assert len(first) == len(token) == 3 and figures.answered == 3
    assert figures.tokens == pytest.approx(3 * 29, abs=4)


def test_a_drafter_that_dies_on_the_way_gives_no_draft() -> None:
    drafter = Drafter(NEVER, np.random.SeedSequence(0))
    drafter.down = 5.0
    assert drafter.draft(4.0, 0.9) == (4.9, True)
    assert drafter.draft(4.5, 0.2) == (5.0, False)


@pytest.mark.parametrize("busy", [0, 1])
def test_a_round_waits_for_all_its_drafters(busy: int) -> None:
    pod = make_pod(SERVICE, drafters=2)
    for _ in range(2):
        pod.take(Stream(0.0, prompt=5, answer=40, pending=5))
    now = pod.begin(0.0)
    assert now is not None
    pod.end(now)
    pod.drafters[busy].free = now + 3
    assert pod.begin(now) == pytest.approx(now + 3 + 0.010 + 0.002 + 0.020 + 0.010 + 0.001)


def test_a_pool_for_two_is_a_batch_of_two() -> None:
    requests = [(60, 41)] * 12
    small, narrow = Limits(max_sequences=4, kv_tokens=210), Limits(max_sequences=2)
    found = [
        simulate(replace(SERVICE, limits=limits), Deployment(), streams(requests, 4)).last for limits in (small, narrow)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("pods", [1, 3])
def test_littles_law(pods: int) -> None:
    """What was counted over time in the system is what the requests say of themselves."""
    answer = 50
    load = poisson(Lengths(100, answer), 4.0 * pods, 100)
    figures = simulate(replace(SERVICE, acceptance=MIXED), Deployment(pods, pods), load)
    first, _, token = figures.times()
    assert len(first) == len(token) == figures.answered > 300 * pods
    assert figures.request_s == pytest.approx(first.sum() + (answer - 1) * token.sum(), rel=1e-9)


def test_a_verifier_that_fails_costs_the_time_it_is_down() -> None:
    flat = replace(SERVICE, costs=StageCosts([(1, 0.02)], [(1, 0.0)], [(1, 0.0)]), budget=0)
    faulty = Deployment(1, 0, verifier_failures=Failures(per_hour=600, recovery_s=2))
    ratio = speed(flat, faulty, 4, 2_000) / speed(flat, Deployment(1, 0), 4, 2_000)
    assert ratio == pytest.approx(6 / (6 + 2), rel=0.05)


def test_a_verifier_that_is_lost_in_a_round_computes_all_rows_again() -> None:
    pod = make_pod(SERVICE)
    pod.take(Stream(0.0, prompt=50, answer=40, pending=50))
    now = 0.0
    for _ in range(3):
        then = pod.begin(now)
        assert then is not None
        now = then
        pod.end(now)
    assert pod.running[0].generated == 1 + 4 + 4
    pod.verifier.down, pod.verifier.up = now + 0.001, now + 7.0
    assert pod.begin(now) == now + 7 and pod.end(now + 7) == 0
    assert pod.begin(now + 7) == pytest.approx(now + 7 + 0.002 + 0.020 + 0.059)
    assert pod.round and pod.round.size == StepSize(rows=59)


def test_a_drafter_that_fails_costs_the_drafts_it_would_have_made() -> None:
    profile, seconds = (
        replace(SERVICE, limits=Limits(rebuild_window=8)),
        2_000,
    )  # few rows, computed again when it is back
    plain, drafting = (speed(profile, Deployment(1, n), 1, seconds) for n in (0, 1))
    faulty = speed(profile, Deployment(1, 1, drafter_failures=Failures(per_hour=360, recovery_s=5)), 1, seconds)
    up = 10 / (10 + 5)
    assert faulty == pytest.approx(up * drafting + (1 - up) * plain, rel=0.03)
    assert plain < 0.7 * drafting


def test_another_drafter_takes_over() -> None:
    often = Failures(per_hour=120, recovery_s=30)
    alone, two = (speed(SERVICE, Deployment(1, n, drafter_failures=often), 4, 1_000) for n in (1, 2))
    assert two > 1.1 * alone


# -- whatever happens ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 60)), min_size=1, max_size=40),
    number=st.integers(1, 12),
    deployment=st.builds(
        Deployment,
        pods=st.integers(1, 3),
        drafters=st.integers(0, 5),
        drafter_failures=st.builds(Failures, st.sampled_from([0, 3000.0]), st.floats(0.01, 2)),
        verifier_failures=st.builds(Failures, st.sampled_from([0, 1000.0]), st.floats(0.01, 2)),
    ),
    limits=st.builds(
        Limits,
        max_sequences=st.integers(1, 6),
        prefill_rows=st.integers(1, 100),
        rebuild_window=st.integers(1, 64),
        kv_tokens=st.sampled_from([1, 500, 2**31]),
    ),
    budget=st.sampled_from([0, 4, 16, "auto"]),
    seed=st.integers(0, 9),
)
def test_every_request_is_answered_once_and_whole(
    requests: list[Tokens], number: int, deployment: Deployment, limits: Limits, budget: int, seed: int
) -> None:
    profile = replace(SERVICE, acceptance=MIXED, limits=limits, budget=budget)
    figures = simulate(profile, deployment, streams(requests, number), seed=seed)
    assert figures.answered == len(figures.times()[0]) == len(requests)
    assert figures.tokens == sum(answer for _, answer in requests)


def test_what_no_queue_holds_is_refused() -> None:
    asked: list[Tokens] = []

    def counted(lengths: Iterable[Tokens]) -> Iterable[Tokens]:
        for one in lengths:
            asked.append(one)
            yield one

    def load(random: np.random.Generator) -> Poisson:
        return Poisson(counted(Lengths(50, 50).draw(random)), 50.0, 20, random)

    figures = simulate(replace(SERVICE, limits=Limits(max_waiting=3)), Deployment(2, 2), load)
    assert figures.refused > 100 and figures.answered > 100
    assert figures.answered + figures.refused == len(asked)


def test_a_seed_decides_everything() -> None:
    profile = replace(SERVICE, acceptance=MIXED)
    faulty = Deployment(2, 2, Failures(100, 2), Failures(50, 2))
    load = poisson(Lengths(50, 50, 0.5), 3.0, 60)
    one, again, other = (summary([simulate(profile, faulty, load, seed=seed)], 2, 2) for seed in (1, 1, 2))
    assert one == again != other


@pytest.mark.parametrize("number", [8, 64])
def test_more_drafters_never_hurt(number: int) -> None:
    found = [
        speed(replace(SERVICE, acceptance=MIXED), Deployment(8, drafters), number) for drafters in (1, 2, 4, 8, 16, 32)
    ]
    assert all(more > 0.985 * fewer for fewer, more in pairwise(found)), found
    assert found[3] > 1.5 * found[0], "a shared drafter is waited for"


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 40)), min_size=1, max_size=12),
    joins=st.lists(st.integers(0, 6), min_size=12, max_size=12),
    prefill_rows=st.integers(1, 128),
    max_sequences=st.integers(1, 5),
    lost=st.sets(st.integers(1, 60), max_size=2),
    replaced=st.sets(st.integers(1, 60), max_size=3),
    window=st.integers(1, 40),
    budget=st.sampled_from([0, 4]),
)
def test_rounds_are_those_of_the_scheduler(
    lengths: list[Tokens],
    joins: list[int],
    prefill_rows: int,
    max_sequences: int,
    lost: set[int],
    replaced: set[int],
    window: int,
    budget: int,
) -> None:
    """Arrivals, prompts in chunks, trees, ends, lost verifiers and replaced drafters: every step has the size that the service's
    own would have."""
    limits = Limits(max_sequences=max_sequences, prefill_rows=prefill_rows, rebuild_window=window)
    profile = replace(SERVICE, limits=limits, budget=budget)
    pod = make_pod(profile)
    theirs = Scheduler(
        PageAllocator(4096, 16), SchedulerLimits(max_sequences, 99, prefill_rows, 2**20, 15, window, False)
    )
    coming = sorted(zip(joins, range(len(lengths)), lengths, strict=False))
    now, number = 0.0, 0
    while coming or pod.load:
        while coming and coming[0][0] <= number:
            _, name, (prompt, answer) = coming.pop(0)
            pod.take(Stream(now, prompt, answer, pending=prompt))
            request = GenerationRequest(str(name), (0,) * prompt, answer, budget=budget, prefix_cache=False)
            theirs.add(Sequence(request, now))
        number += 1
        if number in replaced:  # the drafter died, and another one is there
            pod.drafters[0].lives += 1
            for sequence in theirs.running:
                sequence.forget_drafter()
        for sequence, drafter in assign(theirs, ["d"]):
            sequence.drafter = drafter
            if sequence.computed:
                theirs.rebuild_context(sequence)
        then = pod.begin(now)
        entries = theirs.plan()
        assert (then is None) == (not entries)
        if then is None or pod.round is None:
            continue
        nodes = [entry.budget if entry.sequence.drafter else 0 for entry in entries if entry.sequence.decoding]
        assert pod.round.size == size_of(entries, nodes)
        if number in lost:
            for stream in pod.running:
                stream.pending = stream.prompt + stream.generated
            pod.round = None
            theirs.restart_all()
            continue
        for entry in entries:
            sequence = entry.sequence
            tokens = [0] * (
                (4 if entry.budget and sequence.drafter else 1) if sequence.decoding else int(entry.finishes)
            )
            sequence.computed += len(tokens) if sequence.decoding else entry.rows
            taken, _ = sequence.append(tokens)
            sequence.computed -= len(tokens) - len(taken) if sequence.decoding else 0
            if not sequence.remaining:
                theirs.finish(sequence)
        now = then
        pod.end(now)
        assert [s.generated for s in pod.running] == [s.generated for s in theirs.running]


@given(pods=st.integers(1, 20), drafters=st.integers(1, 60))
def test_drafters_are_dealt_out_evenly(pods: int, drafters: int) -> None:
    deployment = Deployment(pods, drafters)
    dealt = [deployment.serving(pod) for pod in range(pods)]
    assert {drafter for some in dealt for drafter in some} == set(range(drafters))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1 and min(map(len, dealt)) >= 1
    loads = [sum(drafter in some for some in dealt) for drafter in range(drafters)]
    assert max(loads) - min(loads) <= 1


# -- costs and acceptance ------------------------------------------------------------------------------------------------------


@given(length=st.floats(1, 7.9), budget=st.integers(1, 63))
def test_a_geometric_acceptance_gains_what_was_asked(length: float, budget: int) -> None:
    found = Acceptance.geometric({budget: length}, depth=7)
    assert found.tokens(budget) == pytest.approx(length, abs=1e-6)
    assert found.chances(budget).sum() == pytest.approx(1)
    assert found.tokens(0) == 1


def test_acceptance_lies_between_its_neighbours() -> None:
    lengths = [MIXED.tokens(budget) for budget in range(20)]
    assert lengths == sorted(lengths) and lengths[4] < lengths[8] < lengths[16] == pytest.approx(lengths[19])


@pytest.mark.parametrize("number", [1, 4, 16])
@pytest.mark.parametrize("row", [0.0001, 0.003, 0.02])
def test_auto_is_as_good_as_any_budget(number: int, row: float) -> None:
    costs = replace(COSTS, step=[(1, 0.02 + row), (2, 0.02 + 2 * row)])
    profile = replace(SERVICE, costs=costs, acceptance=MIXED, limits=Limits(max_budget=16))
    fixed = [speed(replace(profile, budget=budget), Deployment(), number) for budget in (0, 1, 2, 4, 8, 16)]
    assert speed(replace(profile, budget="auto"), Deployment(), number) > 0.97 * max(fixed)


def test_auto_leaves_a_drafter_that_too_many_wait_for() -> None:
    profile = replace(SERVICE, acceptance=MIXED, limits=Limits(max_budget=16))
    speeds = {budget: speed(replace(profile, budget=budget), Deployment(16, 1), 16) for budget in (0, 4, "auto")}
    assert speeds["auto"] > 0.95 * speeds[0] > 1.5 * speeds[4]


@pytest.mark.parametrize(("read", "attended"), [(10, 30), (30, 10)])
def test_attention_takes_the_longer_of_reading_and_multiplying(read: int, attended: int) -> None:
    costs = replace(COSTS, per_read=1e-3, per_attended=1e-3)
    assert costs.verify_s(StepSize(1, read=read, attended=attended)) == pytest.approx(0.021 + 0.030)


def test_computed_costs_are_those_of_the_plan() -> None:
    profile = paper.profile(KIMI)
    plan = make_plan(KIMI)
    assert profile.limits.kv_tokens == plan.kv_tokens
    assert profile.acceptance.tokens(plan.budget) == pytest.approx(plan.points[0].acceptance_length)
    for point in plan.points:
        read = point.batch * point.context
        for nodes, step in ((0, point.plain), (plan.budget, point.speculative)):
            size = StepSize(point.batch * (1 + nodes), point.batch, 0, read, read * (1 + nodes))
            draft = profile.costs.draft_s(point.batch, read) if nodes else 0.0
            found = draft + profile.costs.rest_s(point.batch) + profile.costs.verify_s(size)
            assert found == pytest.approx(step.seconds, rel=0.01)


def _measured(number: int, budget: int) -> measure.Measured:
    """Of a service that costs COSTS, ten requests of 20 + 41 tokens, three of four accepted where there are drafts."""
    each = 10 if budget else 40  # decoding rounds of a request
    waves = 10 // number
    rounds, trees = waves * (1 + each), 10 * each
    nodes = trees * budget
    verify = 0.020 * rounds + 0.001 * (trees + nodes + 200) + 0.001 * (trees + 10 - rounds)
    draft = (0.008 * waves * each + 0.002 * trees) if budget else 0.0
    stages = {"draft": 0.75 * draft, "build": 0.0005 * rounds, "verify": verify, "accept": 0.0, "commit": 0.25 * draft}
    seconds = verify + draft + 0.002 * rounds
    accepted = [0, 0, 0, trees] if budget else [0]
    return measure.Measured(
        number, budget, [(20, 41)] * 10, seconds, rounds, stages, trees, trees * (budget > 0), nodes, accepted
    )


def test_a_fit_finds_the_costs_and_predicts_other_loads(tmp_path: Path) -> None:
    runs = [_measured(number, budget) for number in (1, 5) for budget in (0, 4, 8)]
    config = tmp_path / "tiny.yaml"
    config.write_text("applications: [{args: {target: {model: smollm2-135m-instruct}}}]")
    found = check.calibrate(config, "paper", runs)
    for size in (StepSize(1), StepSize(20, 4, 4), StepSize(150, 5, 5)):
        assert found.costs.verify_s(size) == pytest.approx(COSTS.verify_s(size), rel=1e-6)
    assert [found.costs.draft_s(n, 0) for n in (1, 7)] == pytest.approx([COSTS.draft_s(n, 0) for n in (1, 7)])
    assert found.costs.rest_s(9) == pytest.approx(0.002)
    assert found.acceptance.tokens(6) == pytest.approx(4)
    for budget in (0, 4, 6):
        compared = check.compare(found, _measured(1, budget))
        assert compared["ratio"] == pytest.approx(1, abs=0.01)
    found.write(tmp_path / "costs.json")
    again = Profile.read(tmp_path / "costs.json")
    assert again.acceptance.known == found.acceptance.known
    assert replace(again, acceptance=THREE, costs=COSTS) == replace(found, acceptance=THREE, costs=COSTS)
    assert again.costs.verify_s(StepSize(33, 3)) == found.costs.verify_s(StepSize(33, 3))


def test_a_service_is_measured_by_its_own_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LocalEngine(tmp_path)
    prompts = ["abc", "Once upon", "a", "x y z"]
    answers = ByName()  # of plain decoding, from which the drafter guesses
    finish = engine.scheduler.finish

    def kept(sequence: Sequence, *, damaged: bool = False) -> None:
        answers[sequence.id.split("/")[0]] = list(sequence.tokens)
        finish(sequence, damaged=damaged)

    monkeypatch.setattr(engine.scheduler, "finish", kept)
    with serving(engine) as url:
        plain = measure.run(url, prompts, 12, measure.Point(2, 0))
        engine.loop.add_drafter(Guesser("d", answers, seed=0))
        drafted = measure.run(url, prompts, 12, measure.Point(2, 8))
    totals = engine.loop.totals
    assert plain.tokens == drafted.tokens == 4 * 12 and [answer for _, answer in plain.requests] == [12] * 4
    assert plain.rounds + drafted.rounds == totals.rounds
    assert plain.nodes == plain.drafted == 0 and drafted.nodes == totals.drafted_tokens > 0
    assert sum(drafted.accepted) == drafted.drafted > 0
    assert sum(n * trees for n, trees in enumerate(drafted.accepted)) == totals.accepted_tokens > 0
    assert plain.trees == 4 * 11, "each token after the first was a root"
    for run in (plain, drafted):
        assert 0 < run.stages["verify"] < sum(run.stages.values()) <= run.seconds


# -- the commands --------------------------------------------------------------------------------------------------------------


def test_the_check_says_what_was_held_out(tmp_path: Path) -> None:
    points = [
        {"streams": 1, "budget": 0, "predicted": 10.0, "measured": 10.0, "ratio": 1.0, "held_out": False},
        {"streams": 2, "budget": 8, "predicted": 30.0, "measured": 25.0, "ratio": 1.2, "held_out": True},
    ]
    text = check.markdown(
        {"command": "c", "date": "2026-11-30T", "machine": {"cpu": "a CPU", "cores": 2}, "points": points}
    )
    assert "| 2 | 8 | no | 30.0 | 25.0 | 1.20 |" in text and "| 1 | 0 | yes |" in text
    assert "1 loads, at worst 1.20 times" in text


@pytest.mark.timed
def test_the_check_measures_and_predicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LocalEngine(tmp_path)
    engine.loop.add_drafter(Guesser("d", defaultdict(lambda: list(range(200))), seed=0))
    config, prompts = tmp_path / "tiny.yaml", tmp_path / "prompts.jsonl"
    config.write_text("applications: [{args: {target: {model: smollm2-135m-instruct}}}]")
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abc", "Once upon", "a", "x y z")))
    served = []

    def here(path: Path, log: Path, *, drafting: bool) -> AbstractContextManager[str]:
        served.append(load_config(path).scheduler.overlap)
        return serving(engine)

    monkeypatch.setattr(check, "serving", here)
    arguments = [
        "--concurrency",
        "1,4",
        "--held-out",
        "2",
        "--budgets",
        "0,4",
        "--held-out-budgets",
        "4",
        "--turns",
        "3",
    ]
    code = check.main(
        [str(config), "--prompts", str(prompts), "--out", str(tmp_path), "--max-tokens", "12", *arguments]
    )
    result = json.loads((tmp_path / "simulator-check-tiny.json").read_text())
    assert served == ["off"] and len(result["measured"]) == 3 * 5
    assert [(p["streams"], p["budget"]) for p in result["points"] if p["held_out"]] == [(2, 4)]
    (ratio,) = (point["ratio"] for point in result["points"] if point["held_out"])
    assert code == (abs(ratio - 1) > 0.15) and 0.2 < ratio < 5
    assert Profile.read(tmp_path / "simulator-costs-tiny.json").acceptance.tokens(4) >= 1


def test_a_sweep_answers_both_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = tmp_path / "costs.json"
    replace(SERVICE, acceptance=MIXED, limits=Limits(max_sequences=4, max_waiting=16)).write(costs)
    arguments = [
        "--pods", "1,2", "--drafters", "0,0.0625,1", "--rate", "0.5,2", "--seconds", "30", "--prompt-tokens", "20",
        "--answer-tokens", "40", "--failures", "100,100", "--recovery", "5,5", "--name", "small",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["simulator", str(costs), "--out", str(tmp_path), *arguments])
    assert command.main() == 0
    result = json.loads((tmp_path / "simulator-small.json").read_text())
    assert len(result["drafters"]) == 2 * 3 and len(result["pods"]) == 2 * 2 * 2
    sound = {(p["pods"], p["part"]): p for p in result["pods"] if not p["failures"]}
    assert sound[2, 0.5]["tokens_per_s"] == pytest.approx(2 * sound[1, 0.5]["tokens_per_s"], rel=0.25)
    assert sound[1, 2]["refused"] > 0 == sound[1, 0.5]["refused"]
    assert sound[1, 2]["ttft_p99_s"] > 3 * sound[1, 0.5]["ttft_p99_s"]
    faulty = {(p["pods"], p["part"]): p for p in result["pods"] if p["failures"]}
    assert all(faulty[key]["tokens_per_s"] < sound[key]["tokens_per_s"] for key in ((1, 2), (2, 2)))
    text = (tmp_path / "simulator-small.md").read_text()
    assert "made up" in text and "**Pods.**" in text
    assert (tmp_path / "simulator-small.png").stat().st_size > 10_000


def test_the_knee_is_where_more_drafters_give_nothing() -> None:
    points = [
        {"per_verifier": each, "tokens_per_s": speed} for each, speed in ((0, 50.0), (0.5, 80.0), (1, 99.0), (2, 100.0))
    ]
    assert report.knee(points) == (1, pytest.approx(1.98))
