"""Fields of a request that show in its answer, over HTTP: choices, stops, special tokens, usage in a stream, and templates."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers.processors import TemplateProcessing

from ddtree.deployments.api.preparation import ApiSettings, Preparation
from ddtree.deployments.api.types import ChatRequest, CompletionRequest, parse
from ddtree.verifier.batch import VerifyBatch
from ddtree.verifier.byte_tokenizer import byte_tokenizer

from ..tiny import HORIZON, Guesser
from .served import ASCII, CONTEXT, EOS, MODEL, PAGE, VOCABULARY, WINDOW, LocalEngine, serving

PROMPT = "The quick brown fox jumps over the lazy dog and runs."
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    return LocalEngine(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def url(engine: LocalEngine) -> Iterator[str]:
    with serving(engine, max_choices=6) as url:
        yield url


def post(url: str, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=60)


def complete(url: str, **body: Any) -> dict[str, Any]:
    """The answer to a request for a few tokens, which must not fail."""
    answer = post(url, **{"prompt": PROMPT, "max_tokens": 6, "ddtree": {"return_token_ids": True}} | body)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def ids(url: str, **body: Any) -> list[int]:
    found: list[int] = complete(url, **body)["ddtree"]["token_ids"]
    return found


def stream(url: str, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    lines = post(url, path, stream=True, **body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_choices_are_what_their_seeds_alone_draw(url: str) -> None:
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 2**63 - 2, "max_tokens": 8}
    alone = [ids(url, **asked | {"seed": seed}) for seed in (2**63 - 2, 2**63 - 1, -(2**63))]
    answer = complete(url, **asked, n=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["ddtree"]["token_ids"] for choice in answer["choices"]] == alone
    assert len({tuple(tokens) for tokens in alone}) == 3
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 24), "a prompt counts once"


def test_choices_without_a_seed_differ(url: str) -> None:
    answer = complete(url, n=4, temperature=1.5, max_tokens=12)
    assert len({tuple(choice["ddtree"]["token_ids"]) for choice in answer["choices"]}) == 4


def test_the_choices_of_several_prompts_come_in_order(url: str) -> None:
    answer = complete(url, prompt=["One", "Two"], n=2, temperature=0)
    own = [ids(url, prompt=prompt, temperature=0) for prompt in ("One", "One", "Two", "Two")]
    assert [choice["ddtree"]["token_ids"] for choice in answer["choices"]] == own
    assert answer["usage"]["prompt_tokens"] == 6


@pytest.mark.parametrize("budget", [0, 8])
def test_choices_compute_their_prompt_once(url: str, engine: LocalEngine, budget: int) -> None:
    """All but the page that the last token is in, and the window that a drafter wants to see."""
    rows: list[int] = []
    start = engine.verifier.start

    def counting(batch: VerifyBatch) -> None:
        rows.append(len(batch.tokens))
        start(batch)

    prompt = [budget, *range(100)]
    engine.verifier.start = counting  # type: ignore[method-assign]
    try:
        complete(url, prompt=prompt, n=4, max_tokens=1, temperature=1, ddtree={"budget": budget})
    finally:
        engine.verifier.start = start  # type: ignore[method-assign]
    again = 1 + WINDOW if budget else len(prompt) % PAGE
    assert sum(rows) == len(prompt) + 3 * again


def test_a_stream_of_choices(url: str) -> None:
    asked: dict[str, Any] = {"messages": [USER], "n": 2, "seed": 1, "temperature": 1.0, "max_tokens": 5, **ASCII}
    chunks = stream(url, "/v1/chat/completions", **asked, stream_options={"include_usage": True})
    whole = post(url, "/v1/chat/completions", **asked).json()
    for index, choice in enumerate(whole["choices"]):
        own = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in own) == choice["message"]["content"]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == [choice["finish_reason"]]
    assert chunks[-1]["usage"]["completion_tokens"] == 10


def test_usage_in_every_chunk_grows_to_the_whole(url: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = stream(url, prompt="abc", max_tokens=5, temperature=0, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] == 5
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}


def test_figures_of_speculation_come_as_vllm_gives_them(engine: LocalEngine) -> None:
    ask: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
    with serving(engine, metrics_horizon=HORIZON) as url:
        tokens = [*b"abc", *ids(url, prompt="abc", **ask)]
        engine.loop.add_drafter(Guesser("d", defaultdict(lambda: tokens), 0))
        answer = complete(url, prompt="abc", **ask, ddtree={"budget": 15})
        figures, found = answer["ddtree"], answer["metrics"]["speculative_decoding"]
        chunks = stream(url, prompt="abc", **ask, ddtree={"budget": 15}, stream_options={"include_usage": True})
        without = [complete(url, prompt="abc", **ask, **fields) for fields in ({"n": 2}, {"ddtree": {"budget": 0}})]
        engine.loop.forget_drafter("d", "the test is over")
    assert found["num_accepted_draft_tokens"] == figures["accepted_tokens"] > 0
    assert found["mean_acceptance_length"] == pytest.approx(figures["acceptance_length"])
    assert len(found["acceptance_histogram"]) == found["num_spec_tokens"] + 1 == HORIZON + 1
    assert sum(found["acceptance_histogram"]) == found["num_spec_steps"] == figures["rounds"]
    assert "metrics" in chunks[-1] and not any("metrics" in chunk for chunk in chunks[:-1])
    assert not any("metrics" in answer for answer in without)


def test_a_stop_token_ends_an_answer_and_shows_when_asked(url: str) -> None:
    plain = ids(url, temperature=0, max_tokens=12)
    stop = plain[5]
    expected = plain[: plain.index(stop) + 1]
    text = complete(url, temperature=0, max_tokens=len(expected))["choices"][0]["text"]
    before = complete(url, temperature=0, max_tokens=len(expected) - 1)["choices"][0]["text"]
    for fields, said in (({}, before), ({"include_stop_str_in_output": True}, text)):
        answer = complete(url, temperature=0, max_tokens=12, stop_token_ids=[stop], **fields)
        assert answer["ddtree"]["token_ids"] == expected
        assert answer["choices"][0] == {"index": 0, "text": said, "logprobs": None, "finish_reason": "stop"}


def test_a_stop_string_shows_when_asked(url: str) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, **ASCII}
    text = complete(url, **asked)["choices"][0]["text"]
    stop = text[2:4]
    end = text.index(stop)
    for include, said in ((False, text[:end]), (True, text[: end + 2])):
        asked |= {"stop": stop, "include_stop_str_in_output": include}
        for answer in (
            complete(url, **asked)["choices"],
            [chunk["choices"][0] for chunk in stream(url, **asked)],
        ):
            assert "".join(choice["text"] for choice in answer) == said
            assert answer[-1]["finish_reason"] == "stop"


def test_eos_is_ignored_when_asked_and_held_back_by_min_tokens(url: str) -> None:
    asked: dict[str, Any] = {"temperature": 0, "logit_bias": {str(EOS): 100}, "max_tokens": 4}
    assert ids(url, **asked) == [EOS]
    assert ids(url, **asked, ignore_eos=True) == [EOS] * 4
    held = ids(url, **asked, ignore_eos=True, min_tokens=2)
    assert EOS not in held[:2] and held[2:] == [EOS, EOS], "as vLLM has it"


def test_special_tokens_show_when_asked(url: str, engine: LocalEngine, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(VOCABULARY)
    tokenizer.add_special_tokens({"eos_token": f"<{EOS}>"})
    asked: dict[str, Any] = {"prompt": "a", "temperature": 0, "logit_bias": {str(EOS): 100}, "max_tokens": 2}
    with serving(engine, tokenizer=tokenizer) as own:
        texts = [
            complete(own, **asked, ignore_eos=True, **fields)["choices"][0]["text"]
            for fields in ({}, {"skip_special_tokens": True}, {"skip_special_tokens": False})
        ]
    assert texts == ["", "", f"<{EOS}>" * 2]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"n": 0}, "n", "greater"),
        ({"n": 7}, "n", "more than 6 answers"),
        ({"n": 4, "prompt": ["a", "b"]}, "n", "4 choices for each of 2 prompts"),
        ({"n": 1.0}, "n", "integer"),
        ({"best_of": 2}, "best_of", "must equal n, which is 1"),
        ({"n": 2, "best_of": 3}, "best_of", "must equal n, which is 2"),
        ({"stop_token_ids": [VOCABULARY]}, "stop_token_ids", f"0 to {VOCABULARY - 1}"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", "integer"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids", "not supported"),
        ({"bad_words": ["a"]}, "bad_words", "not supported"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "not supported"),
        ({"add_generation_prompt": False}, "add_generation_prompt", "not supported"),
    ],
)
def test_bad_values(url: str, fields: dict[str, Any], param: str, words: str) -> None:
    answer = post(url, **{"prompt": "a"} | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert words in error["message"]


def test_best_of_n_is_n(url: str) -> None:
    assert len(complete(url, n=2, best_of=2)["choices"]) == 2


@pytest.mark.parametrize(("fields", "first"), [({}, EOS), ({"add_special_tokens": False}, ord("a"))])
def test_a_prompt_gets_the_tokenizers_special_tokens_unless_told(fields: dict[str, Any], first: int) -> None:
    tokenizer = byte_tokenizer(VOCABULARY)
    begin = [(f"<{EOS}>", EOS)]
    tokenizer._tokenizer.post_processor = TemplateProcessing(f"<{EOS}> $A", special_tokens=begin)
    own = Preparation(ApiSettings(MODEL, CONTEXT, VOCABULARY, (EOS,), 0, 16), tokenizer)
    assert own.completion(parse(CompletionRequest, {"prompt": "a"} | fields))[0].request.prompt_ids[0] == first


@pytest.fixture(scope="module")
def prepare() -> Preparation:
    tokenizer = byte_tokenizer(VOCABULARY)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% if not (loop.last and continue_final_message) %};"
        "{% endif %}{% endfor %}{{ mood or '' }}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return Preparation(ApiSettings(MODEL, CONTEXT, VOCABULARY, (EOS,), 0, 16), tokenizer)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "[user]Hi;[assistant]"),
        ({"add_generation_prompt": False}, "[user]Hi;"),
        ({"continue_final_message": True}, "[user]Hi"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "[user]Hi"),
        ({"chat_template_kwargs": {"mood": "!"}}, "[user]Hi;![assistant]"),
    ],
)
def test_a_template_is_told_what_the_request_says(prepare: Preparation, fields: dict[str, Any], text: str) -> None:
    request = prepare.chat(parse(ChatRequest, {"messages": [USER]} | fields))[0].request
    assert bytes(request.prompt_ids).decode() == text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ],
)
def test_what_a_template_may_not_be_told(url: str, fields: dict[str, Any], param: str) -> None:
    error = post(url, "/v1/chat/completions", messages=[USER], **fields).json()["error"]
    assert error["param"] == param


def test_a_completion_has_no_template(prepare: Preparation) -> None:
    asked = {"prompt": "a", "continue_final_message": False, "chat_template_kwargs": {}, "add_generation_prompt": True}
    assert len(prepare.completion(parse(CompletionRequest, asked))) == 1
