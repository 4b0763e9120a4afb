"""What a running deployment answers to requests that it cannot serve, and what a client that leaves sets free."""

from __future__ import annotations

import time
from typing import Any

import httpx
import openai
import pytest

PROMPT: dict[str, Any] = {"prompt": "Hi", "max_tokens": 2}
USER = {"role": "user", "content": "Hi"}


def assert_error(response: httpx.Response, status: int, *words: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    for word in words:
        assert word in error["message"]
    return error


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    "body", ["[]", "null", "3", '"x"', '{"prompt": ', "", '{"prompt": NaN}', "[" * 5000, b"\xff{}"]
)
def test_malformed_bodies(server: str, path: str, body: str | bytes) -> None:
    assert_error(httpx.post(f"{server}/v1/{path}", content=body), 400, "JSON")


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": [""]}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "must be"),
        ({"prompt": [[]]}, "prompt", "must be"),
        ({"prompt": [49152]}, "prompt", "49152"),
        ({"prompt": [-1]}, "prompt", "-1"),
        ({"prompt": ["a", 3]}, "prompt", "must be"),
        ({"n": 129}, "n", "more than 128 answers"),
        ({"n": 0}, "n", "greater"),
        ({"best_of": 2}, "best_of", "must equal n"),
        ({"stop_token_ids": [49152]}, "stop_token_ids", "49152"),
        ({"presence_penalty": 2.1}, "presence_penalty", "less"),
        ({"frequency_penalty": -2.1}, "frequency_penalty", "greater"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater"),
        ({"min_p": 1.1}, "min_p", "less"),
        ({"min_tokens": -1}, "min_tokens", "greater"),
        ({"min_tokens": 3}, "min_tokens", "2 tokens"),
        ({"logprobs": 21}, "logprobs", "less"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "greater"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "less"),
        ({"logit_bias": {"the": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"49152": 1}}, "logit_bias", "49152"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "-1"),
        ({"logit_bias": [1]}, "logit_bias", "dictionary"),
        ({"nonsense": 1}, "nonsense", "not a field"),
        ({"max_tokens": 0}, "max_tokens", "echo"),
        ({"max_tokens": 8192}, "max_tokens", "8191"),
        ({"temperature": -0.1}, "temperature", "greater"),
        ({"top_p": 1.1}, "top_p", "less"),
        ({"top_k": -2}, "top_k", "greater"),
        ({"seed": 2**63}, "seed", "less"),
        ({"stop": [""]}, "stop[0]", "at least 1"),
        ({"stop": ["x"] * 17}, "stop", "16"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"ddtree": {"budget": -1}}, "ddtree.budget", "greater"),
        ({"ddtree": {"budget": "all"}}, "ddtree.budget", "integer"),
        ({"ddtree": {"budget": 64}}, "ddtree.budget", "maximum is 63"),
        ({"ddtree": {"depth": 3}}, "ddtree.depth", "not a field"),
    ],
)
def test_bad_completions(server: str, fields: dict[str, Any], param: str, word: str) -> None:
    error = assert_error(httpx.post(f"{server}/v1/completions", json=PROMPT | fields), 400, word)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "user", "content": [{"type": "image_url"}]}]}, "messages[1].content"),
        ({"messages": [USER], "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": [USER], "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"messages": [USER], "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [USER], "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ],
)
def test_bad_chats(server: str, fields: dict[str, Any], param: str) -> None:
    error = assert_error(httpx.post(f"{server}/v1/chat/completions", json=fields), 400)
    assert error["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("completions", '{"prompt": "a\\ud800b"}', "prompt"),
        ("completions", '{"prompt": "a", "stop": ["\\udc00"]}', "stop[0]"),
        ("chat/completions", '{"messages": [{"role": "user", "content": "\\ud83d"}]}', "messages[0].content"),
    ],
)
def test_lone_surrogates(server: str, path: str, body: str, where: str) -> None:
    assert assert_error(httpx.post(f"{server}/v1/{path}", content=body), 400, "surrogate")["param"] == where


def test_a_prompt_longer_than_the_context_fails_before_the_stream(server: str) -> None:
    body = {"prompt": [5] * 8192, "max_tokens": 1, "stream": True}
    response = httpx.post(f"{server}/v1/completions", json=body)
    assert response.headers["content-type"] == "application/json"
    assert assert_error(response, 400, "8192")["code"] == "context_length_exceeded"


def test_an_unknown_model_is_404(server: str) -> None:
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-9", prompt="Hi")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="not supported"):
        client.completions.create(model="smollm2-135m-instruct", prompt="Hi", suffix="!")


def test_other_http_errors_have_the_same_form(server: str) -> None:
    assert_error(httpx.post(f"{server}/v1/nothing", json={}), 404)
    assert_error(httpx.get(f"{server}/v1/completions"), 405)
    assert_error(httpx.post(f"{server}/v1/completions", content=b" " * (5 << 20)), 413, "larger")


def test_neutral_values_ask_for_nothing(server: str) -> None:
    fields = {"n": 1, "best_of": 1, "echo": False, "logprobs": None, "presence_penalty": 0, "frequency_penalty": 0.0}
    fields |= {"logit_bias": {}, "suffix": None, "user": "someone", "stop": None, "stream": False}
    assert httpx.post(f"{server}/v1/completions", json=PROMPT | fields, timeout=120).status_code == 200


def idle(server: str) -> bool:
    health = httpx.get(f"{server}/health").json()
    pages = health["kv_pages"]
    return health["running"] == health["waiting"] == 0 and pages["free"] == pages["total"]


def wait_until(condition: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("prompt", ["Once upon a time", ["Once upon a time", "In the beginning"]])
def test_a_client_that_leaves_a_stream_frees_its_slots(server: str, prompt: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 2000, "temperature": 1, "stream": True}
    with httpx.stream("POST", f"{server}/v1/completions", json=body, timeout=120) as response:
        lines = response.iter_lines()  # held: a forgotten iterator closes the stream
        assert next(lines).startswith("data: ")
        assert not idle(server)
    assert wait_until(lambda: idle(server), 15)


def test_a_client_that_leaves_while_waiting_frees_its_slots(server: str) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 2000, "temperature": 1}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server}/v1/completions", json=body, timeout=httpx.Timeout(10, read=1.5))
    assert wait_until(lambda: idle(server), 15)
