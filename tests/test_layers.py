"""Imports run downwards: deployments → drafter, verifier → kernels. Only deployments may know Ray and HTTP."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
MAY_IMPORT = {
    "kernels": {"kernels"},
    "drafter": {"drafter", "kernels"},
    "verifier": {"verifier", "kernels"},
    "deployments": {"deployments", "drafter", "verifier", "kernels"},
    "library": {"deployments"},  # what `import ddtree` gives
}
DISTRIBUTED = {"ray", "fastapi", "starlette", "httpx", "uvicorn", "openai"}


def imported(file: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_run_downwards(package: str) -> None:
    files = list((REPOSITORY / package).rglob("*.py"))
    assert files
    for file in files:
        for name in imported(file):
            parts = name.split(".")
            if parts[0] == "ddtree":
                assert parts[1] in MAY_IMPORT[package], f"{file} imports {name}"
            assert package == "deployments" or parts[0] not in DISTRIBUTED, f"{file} imports {name}"


@pytest.mark.parametrize("module", ["router_deployment", "drafter_deployment", "verifier_deployment", "app", "models"])
def test_a_serve_replica_needs_no_torch(module: str) -> None:
    code = f"import sys, ddtree.deployments.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_the_library_needs_no_ray_and_its_import_nothing() -> None:
    code = """
import sys, ddtree
assert not {"torch", "transformers", "ray", "pydantic"} & {*sys.modules}
assert ddtree.generate is ddtree.deployments.library.generate and "ray" not in sys.modules
assert {"generate", "load"} <= {*dir(ddtree)}
try:
    ddtree.nothing
except AttributeError as error:
    sys.exit("generate" not in str(error))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
