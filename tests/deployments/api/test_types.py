"""Requests: what is accepted, what is refused and why, and what the engine is then told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.deployments.api.errors import ApiError, BadRequest, from_engine
from ddtree.deployments.api.preparation import ApiSettings, Preparation
from ddtree.deployments.api.types import ChatRequest, CompletionRequest, parse
from ddtree.deployments.errors import NotReady
from ddtree.deployments.requests import EditParams
from ddtree.deployments.scheduler import QueueFull

CONTEXT = 64
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def prepare(target_dir: Path) -> Preparation:
    from transformers import AutoTokenizer

    settings = ApiSettings("tiny", CONTEXT, 49152, (2,), default_budget=16, max_budget=63)
    return Preparation(settings, AutoTokenizer.from_pretrained(target_dir))


def completion(prepare: Preparation, **fields: Any) -> Any:
    return prepare.completion(parse(CompletionRequest, {"prompt": [5, 6]} | fields))[0].request


@pytest.mark.parametrize(
    ("prompt", "count"), [("a", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1], [2, 3]], 2), (["", "b"], 2)]
)
def test_prompts_come_in_four_forms(prompt: Any, count: int) -> None:
    assert len(parse(CompletionRequest, {"prompt": prompt}).prompts) == count


@pytest.mark.parametrize("prompt", [None, 3, {}, [], [[]], [1.0], [True], ["a", 1], [[1], 2], [["a"]]])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(BadRequest, match="'prompt' must be a string"):
        parse(CompletionRequest, {"prompt": prompt})


@pytest.mark.parametrize(
    "field", ["n", "best_of", "presence_penalty", "logit_bias", "top_k", "max_tokens", "seed", "stop", "ddtree"]
)
def test_null_is_left_out(field: str) -> None:
    parse(CompletionRequest, {"prompt": "a", field: None})


@pytest.mark.parametrize(
    "fields", [{"n": True}, {"max_tokens": 8.0}, {"max_tokens": "8"}, {"stream": 1}, {"temperature": True}, {"echo": 0}]
)
def test_types_are_not_bent(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(CompletionRequest, {"prompt": "a"} | fields)
    assert caught.value.param == next(iter(fields))


@given(name=st.text(min_size=1))
def test_an_unknown_field_is_named(name: str) -> None:
    known = set(CompletionRequest.model_fields)
    if name not in known:
        with pytest.raises(BadRequest) as caught:
            parse(CompletionRequest, {"prompt": "a", name: object()})
        assert caught.value.param == name


def test_a_message_that_came_from_us_can_be_sent_back() -> None:
    back = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "tool_calls": None,
        "annotations": None,
        "audio": None,
    }
    request = parse(ChatRequest, {"messages": [USER, back, USER]})
    assert [message.for_template()["role"] for message in request.messages] == ["user", "assistant", "user"]


def test_lengths_against_the_context(prepare: Preparation) -> None:
    assert completion(prepare).max_tokens == 16
    assert completion(prepare, prompt=[5] * (CONTEXT - 1)).max_tokens == 1
    assert completion(prepare, prompt=[5] * (CONTEXT - 4), max_tokens=4).max_tokens == 4
    with pytest.raises(BadRequest, match=r"60 tokens leave 4 of the context of 64"):
        completion(prepare, prompt=[5] * (CONTEXT - 4), max_tokens=5)
    with pytest.raises(BadRequest, match="64 tokens and the context 64"):
        completion(prepare, prompt=[5] * CONTEXT)
    chat = prepare.chat(parse(ChatRequest, {"messages": [USER]}))[0].request
    assert chat.max_tokens == CONTEXT - len(chat.prompt_ids)


def test_sampling(prepare: Preparation) -> None:
    sampling = completion(prepare, temperature=0.5, top_p=0.9, top_k=5, seed=-1).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 5, -1)
    assert completion(prepare, top_k=-1).sampling.top_k == 0
    assert completion(prepare).sampling.temperature == 1
    assert completion(prepare).sampling.seed != completion(prepare).sampling.seed
    assert completion(prepare, temperature=0).sampling.seed == 0


def test_edits(prepare: Preparation) -> None:
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": None,
        "repetition_penalty": 1,
        "logit_bias": {},
        "min_tokens": 0,
    }
    assert completion(prepare, **neutral, min_p=0).sampling.edits is None
    assert completion(prepare, min_p=0.25).sampling.min_p == 0.25
    fields = {"presence_penalty": -1, "frequency_penalty": 0.5, "repetition_penalty": 1.5, "min_tokens": 3}
    asked = completion(prepare, **fields, logit_bias={"7": -100, "0": 2.5}).sampling.edits
    assert asked == EditParams(**fields, logit_bias=((7, -100), (0, 2.5)))
    with pytest.raises(BadRequest, match="'min_tokens' is 17, but the answer may have 16 tokens"):
        completion(prepare, min_tokens=17)
    with pytest.raises(BadRequest, match="'logit_bias' has the token id 49152; this model's ids are 0 to 49151"):
        completion(prepare, logit_bias={"49152": 1})


@pytest.mark.parametrize("key", ["", "x", "1.0", "01", "-0", "٣", "1_0", " 1", "9" * 5000])
def test_a_bias_of_what_is_no_token_id(key: str) -> None:
    with pytest.raises(BadRequest, match=r"'logit_bias' has the key .*; its keys are token ids"):
        parse(CompletionRequest, {"prompt": "a", "logit_bias": {key: 1}})


def test_budget(prepare: Preparation) -> None:
    assert completion(prepare).budget == 16
    assert completion(prepare, ddtree={"budget": 0}).budget == 0
    auto, fixed = (completion(prepare, ddtree={"budget": budget}) for budget in ("auto", 63))
    assert (auto.budget, auto.adapts, auto.asked_budget) == (63, True, "auto"), "as large as any, at most"
    assert (fixed.budget, fixed.adapts, fixed.asked_budget) == (63, False, 63)
    assert completion(prepare, ddtree={}).budget == 16
    with pytest.raises(BadRequest, match="maximum is 63"):
        completion(prepare, ddtree={"budget": 64})


def test_a_chat_goes_through_the_model_s_template(prepare: Preparation) -> None:
    request = prepare.chat(parse(ChatRequest, {"messages": [USER]}))[0].request
    text = prepare.tokenizer.decode(request.prompt_ids)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert request.stop_token_ids == (2,)


def test_too_many_prompts_are_refused(prepare: Preparation) -> None:
    with pytest.raises(BadRequest, match="more than 128 answers"):
        completion(prepare, prompt=["a"] * 129)


class _FromRay(RuntimeError):
    """What an actor's exception looks like at its caller: Ray's own, with the cause inside."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("a long traceback")
        self.cause = cause


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (RuntimeError("target logits are not finite"), 500, "target logits are not finite"),
        (NotReady("The model is loading."), 503, "loading"),
        (QueueFull("3 requests are waiting"), 429, "3 requests are waiting"),
        (_FromRay(QueueFull("3 requests are waiting")), 429, "3 requests are waiting"),
    ],
)
def test_what_an_engine_s_exception_becomes(error: Exception, status: int, words: str) -> None:
    answer: ApiError = from_engine(error)
    assert answer.status == status
    assert words in answer.message
    assert (answer.response().headers.get("retry-after") is not None) == (status in (429, 503))
