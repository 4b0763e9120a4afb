"""The page over HTTP: what it may load, that it is asked for once, and that no key is needed to see it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ddtree.deployments.api.keys import read_keys
from ddtree.deployments.api.playground import FILES

from .served import LocalEngine, serving


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("service")
    (folder / "keys").write_text("sk-playground\n")
    with serving(LocalEngine(folder / "target"), keys=read_keys(str(folder / "keys"))) as url:
        yield url


@pytest.mark.parametrize("path", FILES)
def test_the_page_is_there_and_open(url: str, path: str) -> None:
    answer = httpx.get(url + path)
    assert answer.status_code == 200 and answer.content
    policy = answer.headers["content-security-policy"].split("; ")
    assert "default-src 'none'" in policy and "script-src 'self'" in policy
    assert not any("unsafe" in rule or "http" in rule or "*" in rule for rule in policy)
    assert httpx.head(url + path).headers["content-length"] == str(len(answer.content))
    again = httpx.get(url + path, headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_what_the_page_loads_is_what_is_served(url: str) -> None:
    page = httpx.get(url).text
    assert './playground.js"' in page and './playground.css"' in page


def test_the_api_still_needs_its_key(url: str) -> None:
    assert httpx.get(f"{url}/v1/models").status_code == 401
