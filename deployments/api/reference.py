"""The tables of fields in docs/api.md, made from the models that read requests.

    python -m ddtree.deployments.api.reference docs/api.md     # writes them into the file, between its marks

Knows the models and what the tables are to show; knows no request.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel

from ddtree.deployments.api.types import (
    NEUTRAL,
    ChatRequest,
    CompletionRequest,
    Detokenize,
    TokenizeChat,
    TokenizeText,
)
from ddtree.deployments.fields import placed, rows

Endpoints = Mapping[str, type[BaseModel]]
GENERATION: Endpoints = {"completions": CompletionRequest, "chat": ChatRequest}
TOKENS: Endpoints = {"tokenize a prompt": TokenizeText, "tokenize messages": TokenizeChat, "detokenize": Detokenize}


def written(document: str) -> str:
    """Return the document with its tables as they are now. Raises ValueError where it has no marks for them."""
    return placed(document, "deployments/api/reference.py", tables())


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
    parts = {name: dict(rows(kind)) for name, kind in endpoints.items()}
    for field in dict.fromkeys(field for part in parts.values() for field in part):
        marks = " | ".join("✓" if field in part else "" for part in parts.values())
        has = {name: part[field] for name, part in parts.items() if field in part}
        values = _joined({name: row.values for name, row in has.items()})
        meaning = _joined({name: row.meaning for name, row in has.items()})
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


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(written(path.read_text("utf-8")), "utf-8")
