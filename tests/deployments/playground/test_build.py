"""The committed build of the page is of the committed sources, and small."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from ...conftest import REPOSITORY

FOLDER = REPOSITORY / "deployments/playground"
DIGESTS = FOLDER / "built/digests.json"
REBUILD = "the page was not built since: cd deployments/playground && npm install && npm run build"


def digests(paths: list[Path], root: Path) -> dict[str, str]:
    return {path.relative_to(root).as_posix(): sha256(path.read_bytes()).hexdigest() for path in paths}


def test_the_build_is_of_these_sources() -> None:
    names = ["index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts"]
    sources = [*(FOLDER / name for name in names), *(FOLDER / "src").iterdir()]
    assert digests(sources, FOLDER) == json.loads(DIGESTS.read_text())["sources"], REBUILD


def test_nobody_changed_the_build() -> None:
    built = [path for path in (FOLDER / "built").iterdir() if path != DIGESTS]
    assert digests(built, FOLDER / "built") == json.loads(DIGESTS.read_text())["built"], REBUILD
    assert sum(path.stat().st_size for path in built) < 400_000


def test_versions_are_exact_and_come_from_no_address() -> None:
    package = json.loads((FOLDER / "package.json").read_text())
    assert all(
        version[0].isdigit() for kind in ("dependencies", "devDependencies") for version in package[kind].values()
    )
    assert not any(
        "resolved" in one for one in json.loads((FOLDER / "package-lock.json").read_text())["packages"].values()
    )
