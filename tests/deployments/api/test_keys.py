"""API keys over HTTP: what is closed, what stays open, what a client sends, and files that hold none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from ddtree.deployments.api.checks import check
from ddtree.deployments.api.keys import read_keys
from ddtree.deployments.commands.client import settings
from ddtree.deployments.config import ApiConfig
from ddtree.deployments.errors import ConfigError

from .served import MODEL, LocalEngine, serving

KEY, OTHER = "sk-first-0123456789", "sk-second"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("service")
    (folder / "keys").write_text(f"# of the team\n{KEY}\n\n  {OTHER}\n")
    with serving(LocalEngine(folder / "target"), keys=read_keys(str(folder / "keys"))) as url:
        yield url


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_a_right_key_is_served(url: str, key: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=2).usage.completion_tokens == 2


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY, "Bearer ä"]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_anything_else_is_401(url: str, header: str | None, path: str) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    answer = httpx.get(url + path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert KEY not in answer.text


def test_the_real_client_names_the_error(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version", "/openapi.json"])
def test_what_operators_read_stays_open(url: str, path: str) -> None:
    assert httpx.get(url + path).status_code == 200


def test_the_command_line_sends_the_key_of_its_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDTREE_API_KEY", raising=False)
    with httpx.Client(**settings(url)) as client:
        assert client.get("/v1/models").status_code == 401
    monkeypatch.setenv("DDTREE_API_KEY", KEY)
    with httpx.Client(**settings(url)) as client:
        assert client.get("/v1/models").status_code == 200


@pytest.mark.parametrize(
    ("content", "says"), [(None, "cannot read"), ("# none\n\n", "holds no key"), ("two words\n", "printable ASCII")]
)
def test_a_file_without_keys_stops_the_start(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=says) as caught:
        check(ApiConfig(keys_file=str(path)))
    assert "\n" not in str(caught.value)
