"""The installed SGLang as source text: it is read, never imported, so its dependencies are not needed."""

from __future__ import annotations

import ast
import importlib.util
import linecache
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from ddtree.kernels.integrations.sglang import RELEASE


def root() -> Path:
    """The package's folder. Skips where it is not installed."""
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"SGLang's sources are not installed: pip install --no-deps sglang=={RELEASE}")
    return Path(found.submodule_search_locations[0])


def installed() -> str:
    root()
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((root() / file).read_text(encoding="utf-8"))


def definition(file: str, qualified: str) -> ast.FunctionDef | ast.ClassDef:
    """A class, function or method. Raises LookupError where the release has moved it."""
    if not (root() / file).is_file():
        raise LookupError(f"SGLang has no {file}")
    node: Any = tree(file)
    for name in qualified.split("."):
        found = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name]
        if not found:
            raise LookupError(f"{file} has no {qualified}")
        node = found[-1]
    return node


def names(node: ast.FunctionDef | ast.ClassDef) -> list[str]:
    """Arguments of a function but for self and cls, fields of a dataclass."""
    if isinstance(node, ast.ClassDef):
        return [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    found = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return [name for name in found if name not in ("self", "cls")]


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
