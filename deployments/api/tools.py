"""Tools of a chat: their fields, and the grammar of an answer that may or must call them.

Calls are written as Hermes and Qwen models write them, one JSON object between <tool_call> and </tool_call>. Knows no prompt (see
tool_prompt.py), and does not read answers (see tool_calls.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from ddtree.deployments.api.constraints import checked
from ddtree.deployments.api.strict import Strict

OPEN, CLOSE = "<tool_call>", "</tool_call>"
BEFORE_NAME, BEFORE_ARGUMENTS, AFTER_ARGUMENTS = '\n{"name": "', '", "arguments": ', f"}}\n{CLOSE}"
BETWEEN = "\n"
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# As Python writes it, which is how models saw it; a line break inside would look like the end of a call.
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Function(Strict):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None  # the schema is followed either way


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class ToolFields(Strict):
    tools: list[Tool] | None = Field(None, description="[tools](structured-output.md#tools)")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _choice(cls, choice: Any) -> Any:
        if isinstance(choice, dict) or choice in (None, "none", "auto", "required"):
            return choice
        raise ValueError('must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}')

    @model_validator(mode="after")
    def _known(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("has two functions of one name", "tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"names '{self.tool_choice.function.name}', which is not in 'tools'", "tool_choice")
        if self.tool_choice == "required" and not names:
            raise ValueError("is \"required\", but there are no 'tools'", "tool_choice")
        return self

    @property
    def offered(self) -> list[Tool]:
        """Tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def must_call(self) -> bool:
        return bool(self.offered) and self.tool_choice not in (None, "auto")

    def calls_grammar(self) -> str:
        """Of an answer with tools on offer. Raises BadRequest."""
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        functions = [tool.function for tool in self.offered if named in (None, tool.function.name)]
        several = self.parallel_tool_calls is not False and named is None
        return checked(_grammar(functions, several=several, must_call=self.must_call), "tools")


def _grammar(functions: list[Function], *, several: bool, must_call: bool) -> str:
    """Lark. Free text ends where the model itself opens a call; after a call there are only calls."""
    more = f" ({_text(BETWEEN + OPEN)} call)*" if several else ""
    begin = [f"start: {_text(OPEN)} call{more}"]
    if not must_call:
        begin = ["start: TEXT | opened call" + more, f"opened[lazy]: TEXT {_text(OPEN)}", r"TEXT: /(.|\n)*/"]
    calls = "call: " + " | ".join(f"call_{i}" for i in range(len(functions)))
    return "\n".join([*begin, calls, *_calls(functions)])


def _calls(functions: list[Function]) -> Iterable[str]:
    for i, function in enumerate(functions):
        head = _text(BEFORE_NAME + function.name + BEFORE_ARGUMENTS)
        schema = NO_ARGUMENTS if function.parameters is None else function.parameters
        arguments = {"type": "object"} | schema | {"x-guidance": JSON_FORM}
        yield f"call_{i}: {head} %json {json.dumps(arguments)} {_text(AFTER_ARGUMENTS)}"


def _text(text: str) -> str:
    """A string of Lark."""
    return json.dumps(text)
