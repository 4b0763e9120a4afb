"""Structured output and tools of a running deployment, through the `openai` client."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

MODEL = "smollm2-135m-instruct"
ASK: dict[str, Any] = {"model": MODEL, "temperature": 0}
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time"}}


class Person(BaseModel):
    name: str
    kind: Literal["human", "cat"]
    age: int


def test_a_pydantic_model_comes_back(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Tom is a cat of 3 years. Write him as JSON on one line."}]
    answers = [
        client.chat.completions.parse(
            **ASK, messages=messages, response_format=Person, max_tokens=40, extra_body={"ddtree": {"budget": budget}}
        ).choices[0]
        for budget in (0, 16)
    ]
    assert isinstance(answers[0].message.parsed, Person)
    assert answers[0].finish_reason == "stop"
    assert answers[0].message == answers[1].message, "drafts change nothing"


@pytest.mark.parametrize(
    ("fields", "temperature", "pattern"),
    [
        ({"structured_outputs": {"regex": r"[A-Z][a-z]{2,8}, \d{4}"}}, 1, r"[A-Z][a-z]{2,8}, \d{4}"),
        ({"structured_outputs": {"choice": ["Berlin", "Rome"]}}, 0, "Berlin|Rome"),
        ({"guided_grammar": 'root ::= "x" [0-9] "y"'}, 1, "x[0-9]y"),
    ],
)
def test_forms_of_vllm(client: openai.OpenAI, fields: dict[str, Any], temperature: float, pattern: str) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": "The capital of France is", "seed": 5, "max_tokens": 20}
    answers = [
        client.completions.create(**ask, temperature=temperature, extra_body=fields | {"ddtree": {"budget": budget}})
        for budget in (0, 16)
    ]
    assert re.fullmatch(pattern, answers[0].choices[0].text)
    assert answers[0].choices[0].finish_reason == "stop"
    assert answers[0].choices == answers[1].choices


def test_any_json_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        **ASK,
        messages=[{"role": "user", "content": 'Answer with {"ok": true} and nothing else.'}],
        response_format={"type": "json_object"},
        max_tokens=20,
    )
    choice = answer.choices[0]
    assert choice.message.content and choice.message.content.lstrip().startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


def test_calls_and_their_results(client: openai.OpenAI) -> None:
    """The model has to call; asked again it calls by itself, as it did before; told the result it answers."""
    ask: dict[str, Any] = ASK | {"tools": [WEATHER], "max_tokens": 48}
    named = {"type": "function", "function": {"name": "get_weather"}}
    drafts = {"ddtree": {"budget": 16}}
    answer = client.chat.completions.create(**ask, messages=QUESTION, tool_choice=named, extra_body=drafts)
    first = answer.choices[0]
    call = only_call(first)
    assert answer.ddtree["rounds"] < answer.usage.completion_tokens / 3, "what the grammar forces is drafted"
    more: Any = [*QUESTION, first.message, {"role": "user", "content": "What is the weather in Rome?"}]
    again = only_call(client.chat.completions.create(**ask, messages=more).choices[0])
    assert json.loads(again.function.arguments)["city"] == "Rome"
    with client.chat.completions.stream(**ask, messages=more) as stream:  # the client puts the pieces together
        pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        assert only_call(stream.get_final_completion().choices[0]).function.arguments == again.function.arguments
    assert "".join(pieces) == again.function.arguments
    assert len(pieces) > 1
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'}
    ask |= {"messages": [*QUESTION, first.message, result], "max_tokens": 8, "tool_choice": "none"}
    last = client.chat.completions.create(**ask).choices[0].message
    assert last.content and not last.tool_calls


def only_call(choice: Any) -> Any:
    """The call of an answer that is nothing else."""
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert set(json.loads(call.function.arguments)) == {"city", "unit"}
    return call


def test_a_call_may_be_required_or_refused(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = ASK | {"messages": QUESTION, "tools": [CLOCK]}
    chunks = list(client.chat.completions.create(**ask, tool_choice="required", max_tokens=40, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert {call.function.name for call in calls if call.id} == {"get_time"}
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    free = client.chat.completions.create(**ask, tool_choice="none", max_tokens=6).choices[0]
    assert free.message.content and not free.message.tool_calls


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_followed_is_a_400(server: str, stream: bool) -> None:
    for fields in (
        {"guided_regex": "(a"},
        {"guided_grammar": "start: <|nope|>"},
    ):  # the second: only the tokenizer knows
        answer = httpx.post(f"{server}/v1/completions", json={"prompt": "a", "stream": stream} | fields, timeout=60)
        assert answer.status_code == 400
        assert "cannot be followed" in answer.json()["error"]["message"]
