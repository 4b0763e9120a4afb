"""Rounds over a real target in this process: whatever is drafted, whoever comes, goes or dies, every request gets the tokens
that plain decoding alone would have given it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddtree.deployments.budgets import Budgets
from ddtree.deployments.overlap import Mode
from ddtree.deployments.requests import Budget, EditParams, GenerationRequest, SamplingParams
from ddtree.verifier.pages import page_keys

from .tiny import HORIZON, MOST, TOP_K, VOCABULARY, Engine, Guesser, LocalVerifier, Whims, make_target, plain, request


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> LocalVerifier:
    return LocalVerifier(make_target(tmp_path_factory.mktemp("target")))


tokens = st.integers(0, VOCABULARY - 1)
BEGINNINGS = [[7 * i % VOCABULARY for i in range(18)], [5 * i % VOCABULARY for i in range(18)]]  # that prompts share
prompts = st.one_of(
    st.lists(tokens, min_size=1, max_size=20),
    st.builds(
        lambda beginning, length, rest: beginning[:length] + rest,
        st.sampled_from(BEGINNINGS), st.integers(0, 18), st.lists(tokens, min_size=1, max_size=4),
    ),
)  # fmt: skip
requests = st.lists(
    st.tuples(
        prompts,
        st.integers(1, 12),  # max_tokens
        st.sampled_from([0, 1, 3, 7, 15, "auto", "auto"]),  # budget
        st.sampled_from([0.0, 0.7, 1.5]),  # temperature
        st.integers(0, 6),  # the round it arrives in
    ),
    min_size=1,
    max_size=6,
)
# What happens before a round: a drafter joins, dies, leaves; the verifier dies; a request is cancelled.
events = st.lists(
    st.tuples(st.integers(0, 14), st.sampled_from(["join", "die", "leave", "verifier", "cancel"])), max_size=6
)


@given(requests, events, st.integers(0, 1000), st.integers(8, 64), st.sampled_from(["off", "on"]))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_output_is_plain_decoding(
    verifier: LocalVerifier,
    wanted: list[tuple[list[int], int, Budget, float, int]],
    happenings: list[tuple[int, str]],
    seed: int,
    pages: int,
    overlap: Mode,
) -> None:
    asked = [request(f"r{i}", p, n, b, t) for i, (p, n, b, t, _) in enumerate(wanted)]
    truth = {r.request_id: plain(verifier, r) for r in asked}
    answers = {r.request_id: [*r.prompt_ids, *truth[r.request_id]] for r in asked}
    longest = max(len(r.prompt_ids) + r.max_tokens + r.budget + 1 for r in asked)
    verifier.pages, kept = max(pages, -(-longest // verifier.page_size) + 1), verifier.pages  # one is scratch
    engine = Engine(verifier, overlap=overlap, budgets=Budgets(Whims(seed), MOST, HORIZON))
    verifier.pages = kept
    first = Guesser("first", answers, seed)
    engine.loop.add_drafter(first)
    sequences = {}
    cancelled: set[str] = set()

    def between(i: int) -> None:
        for r, (*_, arrival) in zip(asked, wanted, strict=True):
            if arrival == i:
                sequences[r.request_id] = engine.add(r)
        for at, what in happenings:
            if at == i:
                happen(what, i)

    def happen(what: str, i: int) -> None:
        if what == "join":
            engine.loop.add_drafter(Guesser(f"late{i}", answers, seed + i))
        elif what == "die":
            for drafter in engine.loop.drafters.values():
                drafter.dead = True
        elif what == "leave" and engine.loop.drafters:
            engine.loop.forget_drafter(next(iter(engine.loop.drafters)), "it left")
        elif what == "verifier":
            verifier.fail_next = True
        elif what == "cancel" and sequences:
            name = next(iter(sequences))
            sequences[name].cancelled = True
            cancelled.add(name)

    last_arrival = max(arrival for *_, arrival in wanted)
    for i in range(last_arrival + 1):
        between(i)
        try:
            engine.loop.run()
        except Exception as error:
            assert "killed by the test" in str(error)
            engine.loop.verifier_lost()
    engine.run(lambda i: between(i + last_arrival + 1))

    verifier.fail_next = False
    engine.check_end(truth, cancelled)
    assert not engine.scheduler.running and not engine.scheduler.waiting


edits = st.builds(
    EditParams,
    presence_penalty=st.sampled_from([0.0, -2.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -2.0, 0.3, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    logit_bias=st.dictionaries(tokens, st.floats(-8, 8), max_size=4).map(lambda bias: tuple(bias.items())),
    min_tokens=st.integers(0, 12),
)
sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([0, 5]),
    seed=st.integers(0, 99),
    min_p=st.sampled_from([0.0, 0.1]),
    edits=st.none() | edits,
)
edited = st.builds(
    GenerationRequest,
    request_id=st.just(""),
    prompt_ids=st.lists(tokens, min_size=1, max_size=20).map(tuple),
    max_tokens=st.integers(1, 14),
    stop_token_ids=st.sets(tokens, max_size=12).map(tuple),
    sampling=sampling,
    budget=st.sampled_from([0, 3, 15, 40]),
)


@given(st.lists(edited, min_size=1, max_size=4), st.integers(0, 1000), st.integers(0, 6))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_output_is_plain_decoding_under_every_parameter(
    verifier: LocalVerifier, wanted: list[GenerationRequest], seed: int, dies: int
) -> None:
    """Penalties, biases and bans act at each node by its own path. The verifier dies once, so histories are kept beyond it."""
    asked = [dataclasses.replace(r, request_id=f"r{i}") for i, r in enumerate(wanted)]
    truth = {r.request_id: plain(verifier, r) for r in asked}
    engine = Engine(verifier)
    answers = {r.request_id: [*r.prompt_ids, *truth[r.request_id]] for r in asked}
    engine.loop.add_drafter(Guesser("d", answers, seed, errs=0.1))
    for r in asked:
        engine.add(r)
    engine.run_over_a_death(dies)
    assert engine.output == truth
    for r in asked:
        least = r.sampling.edits.min_tokens if r.sampling.edits else 0
        assert not set(truth[r.request_id][:least]) & set(r.stop_token_ids)


@pytest.mark.parametrize("least", range(1, 11))
def test_a_stop_token_is_free_from_its_own_depth_on(verifier: LocalVerifier, least: int) -> None:
    """It is wanted everywhere, and banned above one depth of a tree."""
    stop, edits = 60, EditParams(logit_bias=((60, 100.0),), min_tokens=least)
    asked = request("r", [9, 8, 7], 20, 15, edits=edits)
    asked = dataclasses.replace(asked, stop_token_ids=(stop,))
    truth = plain(verifier, asked)
    assert truth.index(stop) == len(truth) - 1 == least
    engine = Engine(verifier)
    engine.loop.add_drafter(Guesser("d", {"r": [*asked.prompt_ids, *truth]}, 2, errs=0.0))
    engine.add(asked)
    engine.run()
    assert engine.output["r"] == truth


def test_edits_do_what_they_say(verifier: LocalVerifier) -> None:
    """Plain decoding itself: what the parameters mean."""

    def ask(**fields: object) -> list[int]:
        return plain(verifier, request("r", [1, 2, 3], 24, 0, edits=EditParams(**fields)))  # type: ignore[arg-type]

    assert ask() == plain(verifier, request("r", [1, 2, 3], 24, 0))
    assert ask(logit_bias=((5, 100.0),)) == [5] * 24
    assert len(set(ask(logit_bias=((5, 100.0),), frequency_penalty=2.0, presence_penalty=2.0))) == 1, "100 outweighs 48"
    assert len(set(ask(frequency_penalty=-2.0))) <= len(set(ask(frequency_penalty=2.0)))
    assert not {1, 2, 3} & set(ask(repetition_penalty=100.0)), "the prompt counts for repetition"
    assert len(set(ask(repetition_penalty=100.0))) == 24


@pytest.mark.parametrize("budget", [0, 7])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_taken_over_change_no_token(verifier: LocalVerifier, temperature: float, budget: int) -> None:
    asked = [request(name, [*range(30), *rest], 12, budget, temperature) for name, rest in (("a", [1]), ("b", [2, 3]))]
    truth = {r.request_id: plain(verifier, r) for r in asked}
    engine = Engine(verifier)
    engine.loop.add_drafter(Guesser("d", {r.request_id: [*r.prompt_ids, *truth[r.request_id]] for r in asked}, 0))
    sequences = [engine.add(asked[0])]
    engine.run()
    pool, pages = verifier.target.pool, engine.scheduler.pages.share(page_keys(range(30), verifier.page_size))
    pool.k[:, pages] += 1e-7  # still the same to any token, but not to a bit-wise comparison
    before = pool.k[:, pages].clone()
    sequences.append(engine.add(asked[1]))
    engine.run()
    assert engine.output == truth
    assert torch.equal(pool.k[:, pages], before), "who takes rows over does not write them"
    first, second = (s.stats.cached_tokens for s in sequences)
    assert (first, second) == (0, 28 if budget == 0 else 25), "whole pages of 4, less what the drafter's context wants"


def test_an_answer_that_is_sent_back_finds_only_rows_in_their_place(verifier: LocalVerifier) -> None:
    """The last accepted path of a request is never compacted; its rows must not be taken over."""
    taken_over = 0
    for i in range(12):
        first = request(f"first{i}", [i, 3, 5], 14 + i % 4, 15)
        answer = plain(verifier, first)
        second = request(f"second{i}", [*first.prompt_ids, *answer, 2, i], 6, 0)
        truth = {first.request_id: answer, second.request_id: plain(verifier, second)}
        engine = Engine(verifier)
        answers = {r.request_id: [*r.prompt_ids, *truth[r.request_id]] for r in (first, second)}
        engine.loop.add_drafter(Guesser("d", answers, seed=i, errs=0.1))
        for r in (first, second):
            sequence = engine.add(r)
            engine.run()
        assert engine.output == truth
        taken_over += sequence.stats.cached_tokens
    assert taken_over > 12 * 8


def test_drafts_save_rounds(verifier: LocalVerifier) -> None:
    asked = request("r", [3, 1, 4, 1, 5], 40, 15)
    answers = {"r": [*asked.prompt_ids, *plain(verifier, asked)]}
    engine = Engine(verifier)
    engine.loop.add_drafter(Guesser("d", answers, 0, errs=0.1))
    engine.add(asked)
    announced = verifier.announced
    engine.run()
    stats = engine.last["r"].stats  # type: ignore[union-attr]
    assert stats.rounds <= 25, "most rounds commit more than one token"
    assert verifier.announced - announced >= stats.rounds - 2, "all but the prompt's and a last one without drafts"
    assert sum(stats.acceptance_histogram) == stats.rounds
    assert (
        stats.accepted_tokens + stats.rounds >= 39
    )  # the first token comes from the prompt, the last round may overshoot
    assert stats.fallback_rounds == 0


def test_a_drafter_is_fed_every_committed_row_once(verifier: LocalVerifier) -> None:
    """Its features are those of a plain forward over prompt + answer."""
    asked = request("r", list(range(1, 20)), 20, 7)
    truth = plain(verifier, asked)
    drafter = Guesser("d", {"r": [*asked.prompt_ids, *truth]}, 1)
    engine = Engine(verifier, prefill_rows=5)
    engine.loop.add_drafter(drafter)
    engine.add(asked)
    engine.run()
    fed = torch.cat(drafter.features["r"])
    whole = request("whole", [*asked.prompt_ids, *truth], 1, 0)
    direct = Engine(verifier, prefill_rows=100)
    direct.add(whole)
    features = []
    take = verifier.result

    def keep() -> object:
        result = take()
        features.append(result[0].features)
        return result

    verifier.result = keep  # type: ignore[method-assign,assignment]
    direct.run()
    del verifier.result
    torch.testing.assert_close(fed, features[0][: len(fed)], atol=1e-4, rtol=1e-4)
    assert len(fed) >= len(asked.prompt_ids)


@pytest.mark.parametrize(("max_tokens", "stop_at"), [(8, None), (40, 3), (40, 7)])
def test_the_end_cuts_an_accepted_path(verifier: LocalVerifier, max_tokens: int, stop_at: int | None) -> None:
    base = request("r", [9, 8, 7], max_tokens, 15)
    truth = plain(verifier, base)
    stop = () if stop_at is None else (truth[stop_at],)
    asked = GenerationRequest("r", base.prompt_ids, max_tokens, stop, base.sampling, 15)
    expected = truth if stop_at is None else truth[: truth.index(truth[stop_at]) + 1]
    engine = Engine(verifier)
    engine.loop.add_drafter(Guesser("d", {"r": [*base.prompt_ids, *truth]}, 2, errs=0.0))
    engine.add(asked)
    engine.run()
    assert engine.output["r"] == expected
    assert engine.last["r"].finish_reason == ("length" if stop_at is None else "stop")  # type: ignore[union-attr]


def test_logits_that_are_not_finite_fail_their_request_alone(verifier: LocalVerifier) -> None:
    good = request("good", [1, 2, 3], 10, 3)
    truth = plain(verifier, good)
    engine = Engine(verifier)
    engine.add(good)
    bad = engine.add(request("bad", [5, 6, 7, 8], 10, 0))
    engine.loop.run()
    verifier.target.pool.k[:, bad.pages[0]] = torch.nan
    engine.run()
    assert engine.output["good"] == truth
    assert "not finite" in str(engine.last["bad"])


def test_a_failed_round_ends_its_requests_and_no_others(verifier: LocalVerifier) -> None:
    later = request("later", [4, 5], 8, 0)
    truth = plain(verifier, later)
    engine = Engine(verifier)
    engine.add(request("hit", [1, 2, 3], 10, 0))
    engine.loop.run()
    engine.loop.fail_running(RuntimeError("the verifier failed"))
    assert "the verifier failed" in str(engine.last["hit"])
    engine.add(later)
    engine.run()
    assert engine.output["later"] == truth
    assert engine.scheduler.pages.free_pages == engine.scheduler.pages.pages


def test_a_context_longer_than_the_drafter_can_place_is_not_fed(verifier: LocalVerifier) -> None:
    asked = request("r", list(range(1, 31)), 12, 3)
    truth = plain(verifier, asked)
    drafter = Guesser("d", {"r": [*asked.prompt_ids, *truth]}, 0)
    engine = Engine(verifier, max_positions=34)
    engine.loop.add_drafter(drafter)
    engine.add(asked)
    engine.run()
    assert engine.output["r"] == truth
    assert drafter.ends_seen and max(drafter.ends_seen) <= 34


def test_what_will_be_drawn_is_proposed_more_often_where_the_noise_is_shared(verifier: LocalVerifier) -> None:
    wanted = [request(f"shared {i}", BEGINNINGS[i % 2][:9], 24, budget=3, temperature=1.0) for i in range(8)]
    truth = {r.request_id: plain(verifier, r) for r in wanted}
    accepted = []
    for shared in (True, False):
        engine = Engine(verifier, shared_noise=shared)
        answers = {r.request_id: [*r.prompt_ids, *truth[r.request_id]] for r in wanted}
        engine.loop.add_drafter(Guesser("d", answers, seed=3, errs=0.1))
        for r in wanted:
            engine.add(r)
        engine.run()
        engine.check_end(truth, set())
        accepted.append(engine.loop.totals.accepted_tokens)
    assert accepted[0] > 1.2 * accepted[1] > 0


def test_drafts_of_few_depths_and_of_all_take_turns(verifier: LocalVerifier) -> None:
    """What is made ready for the next trees is for drafts with all depths, whatever the last ones had."""
    asked = request("r", [3, 1, 4], 30, 7)
    truth = plain(verifier, asked)
    drafter = Guesser("d", {"r": [*asked.prompt_ids, *truth]}, 0, errs=0.9)
    engine = Engine(verifier)
    engine.loop.add_drafter(drafter)
    sequence = engine.add(asked)
    seen = []

    def between(i: int) -> None:
        few = i % 4 == 1
        sequence.levels, engine.loop._candidates = None, (2, TOP_K) if few else engine.loop._candidates
        seen.append(engine.loop._candidates)

    engine.run(between)
    assert engine.output["r"] == truth and (2, TOP_K) in seen and (HORIZON, TOP_K) in seen
