"""Fields that constrain an answer: what is accepted, what is refused and why, and what the grammar then lets through."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from ddtree.deployments.api.errors import BadRequest
from ddtree.deployments.api.preparation import ApiSettings, Preparation
from ddtree.deployments.api.types import ChatRequest, CompletionRequest, parse
from ddtree.deployments.grammar import tokenizer_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "now"}}
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def prepare(target_dir: Path) -> Preparation:
    from transformers import AutoTokenizer

    settings = ApiSettings("tiny", 8192, 49152, (2,), default_budget=16, max_budget=63)
    return Preparation(settings, AutoTokenizer.from_pretrained(target_dir))


@pytest.fixture(scope="module")
def tokens(target_dir: Path) -> LLTokenizer:
    return tokenizer_of(target_dir, 49152 + 40, (2,))


def grammar(prepare: Preparation, **fields: Any) -> str | None:
    found: str | None = prepare.completion(parse(CompletionRequest, {"prompt": "a"} | fields))[0].request.grammar
    return found


def chat_grammar(prepare: Preparation, **fields: Any) -> str:
    found = prepare.chat(parse(ChatRequest, {"messages": [USER], "tools": [TOOL, OTHER]} | fields))[0].request.grammar
    assert found is not None
    return found


def accepts(tokens: LLTokenizer, grammar: str, text: str) -> bool:
    """Whether the text is a whole answer."""
    matcher = LLMatcher(tokens, grammar, log_level=0)
    ids = tokens.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("fields", "yes", "no"),
    [
        ({"response_format": {"type": "json_object"}}, ['{"b": [1, {}]}', "{}"], ["[]", "1", '{"b": 1', "x"]),
        (
            {"response_format": FORMAT},
            ['{"a": 1}', '{\n  "a": -12\n}', '{"a":1}'],
            ["{}", '{"a": 1, "b": 2}', '{"a": "1"}'],
        ),
        ({"structured_outputs": {"json": SCHEMA}}, ['{"a": 1}'], ["{}"]),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, ["null"], ["{}"]),
        ({"structured_outputs": {"json_object": True}}, ["{}"], ["[]"]),
        ({"structured_outputs": {"regex": r"\d{3}-[ab]+"}}, ["123-ab"], ["12-ab", "123-ab "]),
        (
            {"structured_outputs": {"choice": ["yes", 'a "b"\n', "사과 😀"]}},
            ["yes", 'a "b"\n', "사과 😀"],
            ["no", "yesyes"],
        ),
        ({"structured_outputs": {"grammar": 'start: "a" b*\nb: "b"'}}, ["a", "abb"], ["b"]),
        ({"structured_outputs": {"grammar": 'root ::= "a" ("b" | "c")'}}, ["ab", "ac"], ["a"]),
        ({"guided_json": SCHEMA}, ['{"a": 1}'], ["{}"]),
        ({"guided_regex": "[ab]"}, ["a"], ["c"]),
        ({"guided_choice": ["x", "y"]}, ["x"], ["z"]),
        ({"guided_grammar": 'start: "a"'}, ["a"], ["b"]),
    ],
)
def test_what_each_field_lets_through(
    prepare: Preparation, tokens: LLTokenizer, fields: dict[str, Any], yes: list[str], no: list[str]
) -> None:
    found = grammar(prepare, **fields)
    assert found is not None
    assert all(accepts(tokens, found, text) for text in yes)
    assert not any(accepts(tokens, found, text) for text in no)


def test_whitespace_of_json_can_be_refused(prepare: Preparation, tokens: LLTokenizer) -> None:
    found = grammar(prepare, structured_outputs={"json": SCHEMA, "disable_any_whitespace": True})
    assert found is not None
    assert [accepts(tokens, found, text) for text in ('{"a":1}', '{"a": 1}')] == [True, False]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"structured_outputs": {}},
        {"guided_json": None},
    ],
)
def test_fields_that_ask_for_nothing(prepare: Preparation, fields: dict[str, Any]) -> None:
    assert grammar(prepare, **fields) is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
        ({"guided_regex": "(?<=a)b"}, "guided_regex", "look-behind"),
        ({"guided_json": {"type": "nope"}}, "guided_json", "Invalid type: nope"),
        ({"guided_json": "{"}, "guided_json", "cannot be followed"),
        ({"structured_outputs": {"json": {"uniqueItems": True}}}, "structured_outputs.json", "uniqueItems"),
        ({"guided_grammar": "start: foo"}, "guided_grammar", "unknown name"),
        ({"guided_choice": []}, "guided_choice", "at least 1 item"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "comes with the type"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "is wrong"),
        ({"response_format": FORMAT, "guided_regex": "a"}, "response_format", "'guided_regex' both constrain"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs.regex",
            "both constrain the answer",
        ),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not a field"),
    ],
)
def test_what_cannot_be_followed_is_said(prepare: Preparation, fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        grammar(prepare, **fields)
    assert caught.value.param == param
    assert words in caught.value.message


def test_a_model_without_an_end_has_no_grammars(prepare: Preparation) -> None:
    endless = dataclasses.replace(prepare, settings=dataclasses.replace(prepare.settings, eos_token_ids=()))
    with pytest.raises(BadRequest, match="no end-of-sequence token, which 'guided_regex' needs"):
        grammar(endless, guided_regex="a")


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("fields", "yes", "no"),
    [
        (
            {},
            ["", "Hello <tool", CALL, f"I add. {CALL}\n{NOW}"],
            [f"{CALL} and", '<tool_call>\n{"name": "sub"', "<tool_call>x"],
        ),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, ["x", f"x{CALL}"], [f"{CALL}\n{NOW}"]),
        ({"tool_choice": "required"}, [CALL, NOW, f"{NOW}\n{CALL}"], ["", f"x{CALL}", "x"]),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [CALL], [f"{NOW}\n{CALL}"]),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, [NOW], [CALL, f"{NOW}\n{NOW}", ""]),
    ],
)
def test_which_calls_each_choice_lets_through(
    prepare: Preparation, tokens: LLTokenizer, fields: dict[str, Any], yes: list[str], no: list[str]
) -> None:
    found = chat_grammar(prepare, **fields)
    assert [text for text in yes if not accepts(tokens, found, text)] == []
    assert [text for text in no if accepts(tokens, found, text)] == []


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "sometimes"}, "tool_choice", 'must be "none", "auto", "required"'),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice", "'sub', which is not in"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "no 'tools'"),
        ({"tools": [TOOL, TOOL]}, "tools", "two functions of one name"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom", "not a field"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": 3}}}]},
            "tools",
            "cannot be followed",
        ),
        ({"response_format": FORMAT}, "response_format", "so do 'tools'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "comes with the role tool"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "must be a string"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content", "is required"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": "["}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
            "are not valid JSON",
        ),
    ],
)
def test_tools_that_make_no_sense(prepare: Preparation, fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat_grammar(prepare, **fields)
    assert caught.value.param == param
    assert words in caught.value.message


def test_tools_that_may_not_be_called_leave_the_answer_free(prepare: Preparation) -> None:
    for fields in ({"tools": [TOOL], "tool_choice": "none"}, {"tools": []}, {"tool_choice": "auto"}):
        request = prepare.chat(parse(ChatRequest, {"messages": [USER]} | fields))[0].request
        assert request.grammar is None
        assert request.prompt_ids == prepare.chat(parse(ChatRequest, {"messages": [USER]}))[0].request.prompt_ids
