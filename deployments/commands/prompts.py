"""Prompt files: JSON objects, one a line. Knows nothing of what is done with the prompts."""

from __future__ import annotations

import json
from pathlib import Path

FIELDS = ("prompt", "question", "turns")


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """Return the prompts of a JSONL file, at most `limit`.

    Each line has one of `prompt`, `question` (text) and `turns` (a list of texts, the first is taken).

    Raises:
        ValueError: names the file and line that has none of them.
        OSError: the file cannot be read.
    """
    prompts: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if limit is not None and len(prompts) == limit:
            break
        if line.strip():
            prompts.append(_prompt(line, f"{path}:{number}"))
    if not prompts:
        raise ValueError(f"{path} has no prompts")
    return prompts


def _prompt(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    found = next((row[name] for name in FIELDS if name in row), None) if isinstance(row, dict) else None
    text = found[0] if isinstance(found, list) and found else found
    if not isinstance(text, str) or not text:
        raise ValueError(f"{where} has none of {', '.join(FIELDS)} with a text in it")
    return text
