"""Tool calls in the text of answers and of prompts."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.deployments.api.preparation import ApiSettings, Preparation
from ddtree.deployments.api.tool_calls import ToolCallReader
from ddtree.deployments.api.types import ChatRequest, parse

ARGUMENTS = ['{"city": "Paris", "note": "a } \\n</tool_call> \\" 😀"}', "{}"]
CALLS = [f'<tool_call>\n{{"name": "f{i}", "arguments": {part}}}\n</tool_call>' for i, part in enumerate(ARGUMENTS)]
HERMES = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
    "{{ call.function.name }} {{ call.function.arguments.a + 1 }}</tool_call>{% endfor %}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds."}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": str(i), "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}} for i in (1, 2)
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "one"},
    {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "two"}]},
]


@given(st.sampled_from(["", "Let me see <tool", "a\n"]), st.integers(0, 2), st.lists(st.integers(0, 400), max_size=30))
def test_calls_arrive_whole_at_every_split(content: str, calls: int, cuts: list[int]) -> None:
    text = content + "\n".join(CALLS[:calls])
    reader, said, arguments, names = ToolCallReader(), "", ["", ""], ["", ""]
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)] + [""]
    for i, piece in enumerate(pieces):
        delta = reader.push(piece, last=i == len(pieces) - 1).delta()
        said += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            arguments[call["index"]] += call["function"]["arguments"]
            names[call["index"]] += call["function"].get("name", "")
            assert ("id" in call) == ("name" in call["function"])
    assert said == content
    assert (names, arguments) == ([f"f{i}" if i < calls else "" for i in range(2)], [*ARGUMENTS[:calls], "", ""][:2])
    whole = ToolCallReader()
    whole.push(text, last=True)
    message = whole.message()
    assert (message["content"] or "") == content
    assert [call["function"] for call in message.get("tool_calls", ())] == [
        {"name": f"f{i}", "arguments": ARGUMENTS[i]} for i in range(calls)
    ]
    assert [whole.reason(why) for why in ("stop", "length", None)] == [
        "tool_calls" if calls else "stop",
        "length",
        None,
    ]


@pytest.mark.parametrize("end", range(len(CALLS[0])))
def test_an_answer_that_is_cut_inside_a_call(end: int) -> None:
    reader = ToolCallReader()
    reader.push(CALLS[0][:end], last=True)
    message = reader.message()
    assert reader.reason("stop") == "stop" and reader.reason("length") == "length"
    if calls := message.get("tool_calls"):
        assert CALLS[0][:end].endswith(calls[0]["function"]["arguments"])
    else:
        assert message["content"] in ("", CALLS[0][:end])


def rendered(tokenizer: Any, messages: list[dict[str, Any]], **fields: Any) -> str:
    prepare = Preparation(ApiSettings("tiny", 8192, 49152, (2,), default_budget=16, max_budget=63), tokenizer)
    ids = prepare.chat(parse(ChatRequest, {"messages": messages} | fields))[0].request.prompt_ids
    text: str = tokenizer.decode(ids)
    return text


def test_a_template_without_tools_gets_them_as_text(tokenizer: Any) -> None:
    text = rendered(tokenizer, TALK, tools=[TOOL])
    system, user, assistant, results, _ = text.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n\n# Tools\n")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in system
    assert user == "user\n1?<|im_end|>\n"
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert assistant == f"assistant\n{call}\n{call}<|im_end|>\n"
    joined = "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    assert results == f"user\n{joined}<|im_end|>\n"
    assert "# Tools" in rendered(tokenizer, TALK[1:2], tools=[TOOL]), "also without a system message"
    assert "# Tools" not in rendered(tokenizer, TALK)


def test_a_template_with_tools_gets_them_as_they_are(target_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    tokenizer.chat_template = HERMES
    text = rendered(tokenizer, TALK, tools=[TOOL])
    assert '"name": "add"' in text.partition("</tools>")[0]
    assert "<tool_call>add 2</tool_call><tool_call>add 2</tool_call>" in text
    assert text.endswith("[tool]one[tool]two")
