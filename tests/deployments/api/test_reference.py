"""docs/api.md is up to date."""

from __future__ import annotations

import pytest

from ddtree.deployments.api.reference import tables, written

from ...conftest import REPOSITORY


def test_the_document_says_what_the_code_reads() -> None:
    document = (REPOSITORY / "docs/api.md").read_text("utf-8")
    assert written(document) == document, "run: python -m ddtree.deployments.api.reference docs/api.md"


def test_a_field_has_its_values_and_where_it_works() -> None:
    lines = tables().splitlines()
    assert "| `top_p` | ✓ | ✓ | number 0 to 1 |  |" in lines
    assert '| `suffix` | `null`, `""` |' in lines
    assert any(line.startswith("| `messages[].role` |  | ✓ | `system`") for line in lines)


def test_a_document_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="no place"):
        written("# API\n")
