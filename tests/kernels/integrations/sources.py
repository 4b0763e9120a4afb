"""An installed package as source text: read, never imported, so what it needs itself need not be there. And the names of it that
a page gives."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

Definition = ast.FunctionDef | ast.ClassDef
HOOK = re.compile(r"`([\w/]+\.py):([\w.]+)(?:\(([^)`]*)\))?`")  # FILE:NAME(ARGUMENTS), dataclasses with their fields


def root(package: str, install: str) -> Path:
    """Its folder. Skips where it is not installed."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"the sources of {package} are not installed: {install}")
    return Path(found.submodule_search_locations[0])


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def definition(root: Path, file: str, qualified: str) -> Definition:
    """A class, function or method. Raises LookupError where there is none."""
    if not (root / file).is_file():
        raise LookupError(f"{root.name} has no {file}")
    node: Any = _tree(root / file)
    for name in qualified.split("."):
        found = [n for n in node.body if isinstance(n, Definition) and n.name == name]
        if not found:
            raise LookupError(f"{file} has no {qualified}")
        node = found[-1]
    return node


def names(node: Definition) -> list[str]:
    """Arguments of a function but for self and cls, fields of a dataclass."""
    if isinstance(node, ast.ClassDef):
        return [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
    found = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return [name for name in found if name not in ("self", "cls")]


def check(root: Path, file: str, name: str, arguments: str) -> None:
    """A hook is there, and has the arguments that the page gives, in this order."""
    has = names(definition(root, file, name))
    named = [argument.strip() for argument in arguments.split(",") if argument.strip()]
    assert [argument for argument in has if argument in named] == named, f"{name} has {has}"
