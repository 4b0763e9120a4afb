"""The installed SGLang as source text: it is read, never imported, so its dependencies are not needed."""

from __future__ import annotations

import linecache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ddtree.kernels.integrations.sglang import RELEASE

from . import sources
from .sources import Definition


def root() -> Path:
    """The package's folder. Skips where it is not installed."""
    return sources.root("sglang", f"pip install --no-deps sglang=={RELEASE}")


def installed() -> str:
    root()
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def definition(file: str, qualified: str) -> Definition:
    """Raises LookupError where the release has moved it."""
    return sources.definition(root(), file, qualified)


def run(file: str, function: str, **names_in_scope: Any) -> Any:
    """One function of the release on its own, with what it refers to given by name."""
    node = definition(file, function)
    source = (root() / file).read_text(encoding="utf-8").splitlines(keepends=True)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    text = "from __future__ import annotations\n" + "".join(source[first - 1 : node.end_lineno])
    name = f"<{function} of sglang>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name  # Triton reads a kernel's source
    exec(compile(text, name, "exec"), names_in_scope)
    return names_in_scope[function]
