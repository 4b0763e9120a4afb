"""A conversation with tools as a chat template takes it. Knows Hermes' form of tools; knows no tokenizer and no field's rules.

A template that writes <tool_call> itself gets tools, calls and results as they are. For any other they become text of turns that
it knows: the tools a section of the system prompt, calls part of the assistant's text, results a user's turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from ddtree.deployments.api.tools import AFTER_ARGUMENTS, BEFORE_ARGUMENTS, BEFORE_NAME, OPEN, Tool

SECTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def knows_tools(template: str) -> bool:
    """Whether a chat template has tools and writes calls as we do. (<function=…> is another form between the same tags.)"""
    return "tools" in template and OPEN in template and "<function=" not in template


def signatures(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as templates take them."""
    return [tool.model_dump(exclude_none=True) for tool in tools]


def as_text(messages: Iterable[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Messages, as templates take them, without anything that only some templates know."""
    out: list[dict[str, Any]] = []
    results = False  # the last turn has results of calls: the next one joins it
    for message in messages:
        role, content = message["role"], message["content"] or ""
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if results:
                content = f"{out.pop()['content']}\n{content}"
        elif calls := message.get("tool_calls"):
            content = "\n".join([*([content] if content else []), *map(_call, calls)])
        results = role == "tool"
        out.append({"role": "user" if results else role, "content": content})
    if tools:
        own = [out.pop(0)["content"]] if out and out[0]["role"] == "system" else []
        section = SECTION.format(signatures="\n".join(json.dumps(each) for each in signatures(tools)))
        out.insert(0, {"role": "system", "content": "\n\n".join([*own, section])})
    return out


def _call(call: dict[str, Any]) -> str:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return f"{OPEN}{BEFORE_NAME}{function['name']}{BEFORE_ARGUMENTS}{arguments}{AFTER_ARGUMENTS}"
