"""docs/configuration.md is up to date, and every key says what it means."""

from __future__ import annotations

from ddtree.deployments.config import AppConfig
from ddtree.deployments.config_reference import tables, written
from ddtree.deployments.fields import rows
from ddtree.verifier.backends import BACKENDS

from ..conftest import REPOSITORY


def test_the_document_says_what_the_code_reads() -> None:
    document = (REPOSITORY / "docs/configuration.md").read_text("utf-8")
    assert written(document) == document, "run: python -m ddtree.deployments.config_reference docs/configuration.md"


def test_every_key_is_there_and_says_what_it_means() -> None:
    lines = tables().splitlines()
    for key, row in rows(AppConfig):
        if "." in key or key == "transport":  # the others are the sections that hold them
            assert row.meaning, f"{key} has no description"
            assert any(line.startswith(f"| `{key}` |") for line in lines)


def test_a_key_has_its_values_and_its_default() -> None:
    keys = dict(rows(AppConfig))
    assert keys["verifier.kv_tokens"][::2] == ("integer from 0, or `auto`", "`32768`")
    assert keys["verifier.gpu_memory_fraction"][::2] == ("number above 0, at most 1", "`0.9`")
    assert keys["target.model"].default == "required"
    assert all(f"{name}:" in keys["verifier.backend"].meaning for name in BACKENDS)
