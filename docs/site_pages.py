"""Hooks of mkdocs, for mkdocs.yml alone: benchmarks/README.md, which lies beside docs/, is a page of the site too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

BENCHMARKS = "benchmarks/README.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page that lies beside docs/."""
    text = (Path(config.docs_dir).parent / BENCHMARKS).read_text("utf-8")
    files.append(File.generated(config, BENCHMARKS, content=text.replace("](../docs/", "](../")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to that page lead to where it is on the site."""
    return markdown.replace(f"](../{BENCHMARKS}", f"]({BENCHMARKS}")
