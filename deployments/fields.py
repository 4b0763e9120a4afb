"""Fields of pydantic models in words, for the tables in docs/, and the place of the tables in a page.

Knows JSON schemas and Markdown; knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

Schema = dict[str, Any]


class Row(NamedTuple):
    """What there is to say about a field."""

    values: str
    meaning: str
    default: str  # as JSON; "required" where there is none


def placed(document: str, source: str, tables: str) -> str:
    """Return the document with the tables that `source` makes between its marks. Raises ValueError where it has no marks."""
    begin, end = f"<!-- fields: begin (made by {source}) -->", "<!-- fields: end -->"
    before, found, rest = document.partition(begin)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"the document has no place for the tables: put {begin} and {end} into it")
    return f"{before}{begin}\n{tables}\n{end}{after}"


def rows(kind: type[BaseModel]) -> Iterator[tuple[str, Row]]:
    """Yield every field, those of models inside after the field that holds them, by its name from the top."""
    schema = kind.model_json_schema()
    yield from _fields(schema, schema.get("$defs", {}), "")


def _fields(model: Schema, models: dict[str, Schema], above: str) -> Iterator[tuple[str, Row]]:
    for name, schema in model["properties"].items():
        field = above + name
        default = f"`{json.dumps(schema['default'])}`" if "default" in schema else "required"
        yield field, Row(_values(schema, models), schema.get("description", ""), default)
        for option, suffix in _options(schema):
            if "$ref" in option:
                yield from _fields(_model(option, models), models, f"{field}{suffix}.")


def _options(schema: Schema, suffix: str = "") -> Iterator[tuple[Schema, str]]:
    """Yield what a field may be, and [] for each list around it."""
    for option in schema.get("anyOf", [schema]):
        if option.get("type") == "array":
            yield from _options(option["items"], f"{suffix}[]")
        else:
            yield option, suffix


def _model(reference: Schema, models: dict[str, Schema]) -> Schema:
    return models[reference["$ref"].rsplit("/")[-1]]


def _values(schema: Schema, models: dict[str, Schema]) -> str:
    """Return the values of a field in words. That null is a field left out is said once, in the document."""
    options = [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]
    return ", or ".join(dict.fromkeys(_one(option, models) for option in options))


def _one(schema: Schema, models: dict[str, Schema]) -> str:
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind: str = schema.get("type", "object")
    if kind == "array":
        most = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
        item = _values(schema["items"], models)
        return f"list of {f'({item})' if ', or' in item else item}{most}"
    if kind == "object" and isinstance(value := schema.get("additionalProperties"), dict) and value:
        return f"object of {_values(value, models)}"
    return {"boolean": "true, false"}.get(kind, kind) + _bounds(schema)


def _bounds(schema: Schema) -> str:
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if above is not None:
        return f" above {above:g}" + (f", at most {high:g}" if high is not None else "")
    if low is None and high is None:
        return ""
    if high is None:
        return f" from {low}"
    return " of 64 bit" if high > 2**62 else f" {low} to {high}"
