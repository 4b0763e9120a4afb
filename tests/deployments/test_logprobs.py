"""Log-probabilities over rounds: whatever is drafted, chunked, preempted or lost, each token has those of plain decoding, and
these are the log-softmax of a whole forward."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

from ddtree.deployments.requests import Delta, EditParams, GenerationRequest, SamplingParams, TokenLogprobs
from ddtree.deployments.sequence import Sequence
from ddtree.verifier.batch import VerifyBatch, VerifyResult

from .tiny import VOCABULARY, Engine, Guesser, LocalVerifier, make_target, plain, request

Models = tuple[LocalVerifier, LlamaForCausalLM]
tokens = st.integers(0, VOCABULARY - 1)
tops = st.sampled_from([None, 0, 1, 5, 20])
PROMPTS = [
    list(range(begin, begin + 24)) for begin in (0, 30)
]  # that requests share, for the prefix cache to be tempted


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = make_target(tmp_path_factory.mktemp("target"))
    verifier = LocalVerifier(folder)
    torch.set_num_threads(1)
    return verifier, LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


@torch.inference_mode()
def whole(model: LlamaForCausalLM, ids: list[int]) -> Tensor:
    """[n - 1, V]: the log-softmax of one forward over all tokens, at each but the last."""
    logits: Tensor = model(torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(-1)


def check(found: tuple[TokenLogprobs, ...], ids: list[int], expected: Tensor, top: int | None) -> None:
    """`found` of the tokens `ids`, whose distributions are `expected` [len(ids), V]."""
    if top is None:
        assert found == ()
        return
    for one, token, row in zip(found, ids, expected, strict=True):
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert abs(one.rank - 1 - int((row > row[token]).sum())) <= int((abs(row - row[token]) < 1e-4).sum()) - 1
        best = row.topk(top).values.tolist()
        assert [value for _, value in one.top] == pytest.approx(best, abs=1e-4)
        assert [value for _, value in one.top] == pytest.approx([float(row[i]) for i, _ in one.top], abs=1e-4)
        assert one.logprob == next((value for i, value in one.top if i == token), one.logprob), "the same, to the bit"


class Recorder(Engine):
    """Keeps the log-probabilities of every delta."""

    def __init__(self, verifier: LocalVerifier) -> None:
        super().__init__(verifier)
        self.answers: dict[str, tuple[TokenLogprobs, ...]] = {}
        self.prompts: dict[str, list[tuple[TokenLogprobs, ...]]] = {}  # by delta
        emit = self.loop._emit

        def keep(outgoing: list[tuple[Sequence, Delta | Exception]]) -> None:
            emit(outgoing)
            for sequence, delta in outgoing:
                if isinstance(delta, Delta):
                    self.answers[sequence.id] = self.answers.get(sequence.id, ()) + delta.logprobs
                    self.prompts.setdefault(sequence.id, []).append(delta.prompt_logprobs)

        self.loop._emit = keep


asking = st.builds(
    GenerationRequest,
    request_id=st.just(""),
    prompt_ids=st.one_of(
        st.lists(tokens, min_size=1, max_size=30).map(tuple),
        st.builds(lambda prompt, rest: (*prompt, *rest), st.sampled_from(PROMPTS), st.lists(tokens, max_size=4)),
    ),
    max_tokens=st.integers(1, 12),
    stop_token_ids=st.sets(tokens, max_size=6).map(tuple),
    sampling=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.8]),
        top_k=st.sampled_from([0, 5]),
        seed=st.integers(0, 99),
        edits=st.none() | st.just(EditParams(frequency_penalty=0.7, logit_bias=((3, 4.0),))),
    ),
    budget=st.sampled_from([0, 3, 15]),
    logprobs=tops,
    prompt_logprobs=tops,
    every_round=st.booleans(),
)


@given(st.lists(asking, min_size=1, max_size=5), st.integers(0, 1000), st.integers(0, 12), st.integers(0, 30))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_they_are_those_of_plain_decoding(
    models: Models, wanted: list[GenerationRequest], seed: int, dies: int, pages: int
) -> None:
    verifier, model = models
    asked = [dataclasses.replace(r, request_id=f"r{i}") for i, r in enumerate(wanted)]
    truth = {r.request_id: plain(verifier, dataclasses.replace(r, logprobs=None, prompt_logprobs=None)) for r in asked}
    longest = max(len(r.prompt_ids) + r.max_tokens + r.budget + 1 for r in asked)
    kept, verifier.pages = verifier.pages, -(-longest // verifier.page_size) + 1 + pages
    engine = Recorder(verifier)
    verifier.pages = kept
    engine.loop.add_drafter(Guesser("d", {n: [*asked[i].prompt_ids, *truth[n]] for i, n in enumerate(truth)}, seed))
    for r in asked:
        engine.add(r)
    engine.run_over_a_death(dies)
    assert engine.output == truth
    for r in asked:
        name, prompt, answer = r.request_id, list(r.prompt_ids), truth[r.request_id]
        expected = whole(model, prompt + answer)
        check(engine.answers[name], answer, expected[len(prompt) - 1 :], r.logprobs)
        first, *later = engine.prompts[name]
        check(first, prompt[1:], expected[: len(prompt) - 1], r.prompt_logprobs)
        assert not any(later)


def test_rows_that_are_kept_are_taken_over_once_they_are_scored(models: Models) -> None:
    verifier, _ = models
    prompt = PROMPTS[0]
    engine = Recorder(verifier)
    engine.add(request("first", prompt, 4, 0))
    engine.run()
    asked = dataclasses.replace(request("second", prompt, 4, 0), prompt_logprobs=0)
    second = engine.add(asked)
    engine.run()
    assert second.stats.cached_tokens == 0, "all of its rows are wanted"
    rest = engine.add(dataclasses.replace(asked, request_id="third", prompt_logprobs=None, logprobs=2))
    engine.run()
    assert rest.stats.cached_tokens == 20, "whole pages of 4, and the last token is computed"
    assert len(engine.answers["third"]) == 4


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_prompt_that_is_not_finite_fails_its_request_alone(models: Models, value: float) -> None:
    verifier, _ = models
    good = dataclasses.replace(request("good", [1, 2, 3], 6, 3), logprobs=2, prompt_logprobs=2)
    engine = Recorder(verifier)
    engine.add(good)
    bad = engine.add(dataclasses.replace(request("bad", list(range(40)), 6, 0), prompt_logprobs=0))
    engine.loop.run()  # a chunk of the long prompt
    verifier.target.pool.v[:, bad.pages[0]] = value
    engine.run()
    assert len(engine.answers["good"]) == 6 and len(engine.prompts["good"][0]) == 2
    assert "not finite" in str(engine.last["bad"])


def test_nobody_asks_nothing_travels(models: Models) -> None:
    verifier, _ = models
    engine, found = Recorder(verifier), []
    target = verifier.target
    step = target.step

    def keep(batch: VerifyBatch) -> VerifyResult:
        result = step(batch)
        found.append((batch.logprobs, result.logprobs))
        return result

    target.step = keep  # type: ignore[method-assign]
    engine.add(request("r", [1, 2, 3], 4, 0))
    engine.run()
    del target.step
    assert found == [(None, None)] * 4
    assert engine.answers["r"] == ()
