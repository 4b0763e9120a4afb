"""The notebooks in docs/ run as they are, cell by cell, in one namespace, and show what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
LESS = 1.5  # times less processor time; measured 2.3 to 2.9, on a machine with nothing to spare


def run(name: str) -> dict[str, Any]:
    """What its cells leave behind. They hold Python alone, none of Jupyter's commands."""
    names: dict[str, Any] = {}
    for number, cell in enumerate(json.loads((DOCS / name).read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), names)
    return names


def test_the_same_tokens_sooner(target_dir: Path) -> None:
    found = run("generate.ipynb")
    assert found["identical"] is True
    assert found["ratio"]["processor time"] > LESS
