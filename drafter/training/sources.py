"""Python functions and prose passages from folders of Python files. Knows neither tokens nor chat."""

from __future__ import annotations

import ast
import random
import re
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

MAX_FILE_BYTES = 400_000
FUNCTIONS_PER_FILE, PASSAGES_PER_FILE = 12, 8


@dataclass(frozen=True)
class Function:
    name: str
    arguments: str
    summary: str  # first paragraph of the docstring, one line
    source: str
    stub: str  # signature and docstring, to be completed


@dataclass
class Harvest:
    functions: list[Function] = field(default_factory=list)
    passages: list[str] = field(default_factory=list)


def harvest(roots: Iterable[Path], rng: random.Random, functions: int, passages: int, seconds: float) -> Harvest:
    """Reads files in random order until both counts are reached, the files or the time end."""
    files = sorted({path for root in roots for path in Path(root).rglob("*.py")})
    rng.shuffle(files)
    files.sort(key=lambda path: path.name != "topics.py")  # the language reference in pydoc: the best prose, so first
    found, names, seen, end = Harvest(), set[str](), set[str](), time.monotonic() + seconds
    for path in files:
        if time.monotonic() > end or (len(found.functions) >= functions and len(found.passages) >= passages):
            break
        tree = _parse(path)
        if tree is None:
            continue
        if len(found.functions) < functions:
            found.functions += _functions(tree, names, rng)
        if len(found.passages) < passages:
            texts = [p for p in _passages(tree, path.name == "topics.py", rng) if p not in seen]
            texts = texts if path.name == "topics.py" else texts[:PASSAGES_PER_FILE]
            seen.update(texts)
            found.passages += texts
    rng.shuffle(found.passages)
    return Harvest(found.functions[:functions], found.passages[:passages])


def _parse(path: Path) -> ast.Module | None:
    try:
        if path.stat().st_size > MAX_FILE_BYTES and path.name != "topics.py":
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's escape sequences
            return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _functions(tree: ast.Module, names: set[str], rng: random.Random) -> list[Function]:
    out: list[Function] = []
    for node in ast.walk(tree):
        if len(out) >= FUNCTIONS_PER_FILE:
            break
        if not isinstance(node, ast.FunctionDef) or node.name in names:
            continue
        doc = ast.get_docstring(node)
        if not doc or not 25 <= len(doc) <= 900 or (node.name.startswith("__") and rng.random() < 0.8):
            continue
        try:
            source, arguments = ast.unparse(node), ast.unparse(node.args)
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        except RecursionError:
            continue
        if len(source) > 1600:
            continue
        stub = f'def {node.name}({arguments}){returns}:\n    """{doc}\n    """\n'
        if rng.random() < 0.4:
            stub = "from typing import List, Dict, Tuple, Optional\n\n\n" + stub
        names.add(node.name)
        out.append(Function(node.name, arguments, doc.split("\n\n")[0].replace("\n", " "), source, stub))
    return out


def _passages(tree: ast.Module, all_strings: bool, rng: random.Random) -> Iterator[str]:
    """Runs of one to five prose paragraphs from module and class docstrings (or from every string)."""
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef)]
    texts = [ast.get_docstring(n) or "" for n in nodes]
    if all_strings:
        texts += [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    for text in texts:
        paragraphs = [re.sub(r"\s+", " ", p).strip() for p in text.split("\n\n")]
        prose = [p for p in paragraphs if len(p) > 80 and sum(c.isalpha() or c == " " for c in p) > 0.85 * len(p)]
        at = 0
        while at < len(prose):
            run = rng.choice([1, 1, 1, 2, 3, 5])
            yield " ".join(prose[at : at + run])[:2400]
            at += run
