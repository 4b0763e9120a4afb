"""The tables of fields in docs/api.md, made from the models that read requests.

    python -m ddtree.deployments.api.reference docs/api.md     # writes them into the file, between its marks

Knows JSON schemas and Markdown; knows no request.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ddtree.deployments.api.types import (
    NEUTRAL,
    ChatRequest,
    CompletionRequest,
    Detokenize,
    TokenizeChat,
    TokenizeText,
)

BEGIN, END = "<!-- fields: begin (made by deployments/api/reference.py) -->", "<!-- fields: end -->"
Endpoints = Mapping[str, type[BaseModel]]
GENERATION: Endpoints = {"completions": CompletionRequest, "chat": ChatRequest}
TOKENS: Endpoints = {"tokenize a prompt": TokenizeText, "tokenize messages": TokenizeChat, "detokenize": Detokenize}
Row = tuple[str, str]  # the values of a field, what it means
Schema = dict[str, Any]


def written(document: str) -> str:
    """Return the document with its tables as they are now. Raises ValueError where it has no marks for them."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document has no place for the tables: put {BEGIN} and {END} into it")
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


def tables() -> str:
    """Return the tables: fields that work, of answers and of tokens, and those that may only ask for nothing."""
    return "\n\n".join(
        [
            _table(GENERATION),
            "Known fields that are not supported, and the values that ask for nothing:",
            _neutral(),
            "Fields of /tokenize and /detokenize:",
            _table(TOKENS),
        ]
    )


def _table(endpoints: Endpoints) -> str:
    lines = [f"| field | {' | '.join(endpoints)} | values | |", f"|---|{'---|' * len(endpoints)}---|---|"]
    rows = {name: dict(_rows(kind)) for name, kind in endpoints.items()}
    for field in dict.fromkeys(field for part in rows.values() for field in part):
        marks = " | ".join("✓" if field in part else "" for part in rows.values())
        has = {name: part[field] for name, part in rows.items() if field in part}
        values, meaning = (_joined({name: row[i] for name, row in has.items()}) for i in range(2))
        lines.append(f"| `{field}` | {marks} | {values} | {meaning} |")
    return "\n".join(lines)


def _joined(said: dict[str, str]) -> str:
    """Return what all endpoints say, or what each of them says."""
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    return "; ".join(f"{name}: {what}" for name, what in said.items() if what)


def _neutral() -> str:
    lines = ["| field | accepted where it is |", "|---|---|"]
    for field, accepted in sorted(NEUTRAL.items()):
        if not any(field in kind.model_fields for kind in GENERATION.values()):
            lines.append(f"| `{field}` | {', '.join(f'`{json.dumps(value)}`' for value in accepted)} |")
    return "\n".join(lines)


def _rows(kind: type[BaseModel]) -> Iterator[tuple[str, Row]]:
    schema = kind.model_json_schema()
    yield from _fields(schema, schema.get("$defs", {}), "")


def _fields(model: Schema, models: dict[str, Schema], above: str) -> Iterator[tuple[str, Row]]:
    for name, schema in model["properties"].items():
        field = above + name
        yield field, (_values(schema, models), schema.get("description", ""))
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
    low, high = schema.get("minimum"), schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is None and high is None:
        return ""
    if high is None:
        return f" from {low}"
    return " of 64 bit" if high > 2**62 else f" {low} to {high}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(written(path.read_text("utf-8")), "utf-8")
