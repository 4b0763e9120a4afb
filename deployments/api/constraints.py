"""What an answer must be: the fields that say so, and their meaning as one grammar in llguidance's form.

OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`. Knows no tokenizer and no engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, Self

from llguidance import LLMatcher, grammar_from
from pydantic import Field, model_validator

from ddtree.deployments.api.errors import BadRequest
from ddtree.deployments.api.strict import Strict
from ddtree.deployments.grammar import why_not

Schema = dict[str, Any]
Choice = Annotated[list[str], Field(min_length=1)]


class JsonSchema(Strict):
    name: str
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None  # the schema is followed either way


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('comes with the type "json_schema", and only with it', "json_schema")
        return self


class StructuredOutputs(Strict):
    """One of the first five; `grammar` is Lark or GBNF."""

    json_: Schema | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Choice | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None  # of JSON, between its tokens; else as much as the model likes


class ConstraintFields(Strict):
    """One of them constrains the answer, or none."""

    response_format: ResponseFormat | None = Field(None, description="[structured output](structured-output.md)")
    structured_outputs: StructuredOutputs | None = Field(None, description="the same, in vLLM's form")
    guided_json: Schema | str | None = Field(None, description="this and the next three: vLLM's older names")
    guided_regex: str | None = None
    guided_choice: Choice | None = None
    guided_grammar: str | None = None

    def constraint(self) -> tuple[str, str] | None:
        """The field that constrains the answer, and the grammar of the answer. Raises BadRequest."""
        found = self._found()
        if not found:
            return None
        (param, value, make), *others = found
        if others:
            raise BadRequest(f"'{param}' and '{others[0][0]}' both constrain the answer: send one of them.", param)
        try:
            grammar = make(value)
        except ValueError as error:
            raise BadRequest(f"'{param}' cannot be followed: {error}", param) from None
        return param, checked(grammar, param)

    def _found(self) -> list[tuple[str, Any, Callable[[Any], str]]]:
        asked, other = self.response_format, self.structured_outputs or StructuredOutputs()
        schema = asked.json_schema.schema_ or {} if asked and asked.json_schema else None
        anything, dense = {"type": "object"}, partial(json_grammar, whitespace=not other.disable_any_whitespace)
        found: list[tuple[str, Any, Callable[[Any], str]]] = [
            ("response_format", anything if asked and asked.type == "json_object" else schema, json_grammar),
            ("structured_outputs.json", other.json_, dense),
            ("structured_outputs.json_object", anything if other.json_object else None, dense),
            ("structured_outputs.regex", other.regex, LLMatcher.grammar_from_regex),
            ("structured_outputs.choice", other.choice, _choice),
            ("structured_outputs.grammar", other.grammar, _written),
            ("guided_json", self.guided_json, json_grammar),
            ("guided_regex", self.guided_regex, LLMatcher.grammar_from_regex),
            ("guided_choice", self.guided_choice, _choice),
            ("guided_grammar", self.guided_grammar, _written),
        ]
        return [field for field in found if field[1] is not None]


def checked(grammar: str, param: str) -> str:
    """The grammar. Raises BadRequest with llguidance's reason where it makes no sense."""
    if reason := why_not(grammar):
        raise BadRequest(f"'{param}' cannot be followed: {reason}", param)
    return grammar


def json_grammar(schema: Schema | str, *, whitespace: bool = True) -> str:
    """Raises ValueError where the schema is no JSON."""
    return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": whitespace})


def _choice(choices: list[str]) -> str:
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _written(grammar: str) -> str:
    return grammar_from("grammar", grammar)
