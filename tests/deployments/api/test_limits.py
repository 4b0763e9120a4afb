"""Overload, time limits and a service that is not ready, over HTTP: who is refused is told when to come again, and what a
refused request held is free."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from ddtree.deployments.api import body
from ddtree.deployments.errors import NotReady

from .served import ASCII, MODEL, LocalEngine, serving

ASK: dict[str, Any] = {"prompt": "Once", "max_tokens": 4}
LIMIT_S = 0.8


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    return LocalEngine(tmp_path_factory.mktemp("target"), max_sequences=2, max_waiting=2)


@pytest.fixture(scope="module")
def url(engine: LocalEngine) -> Iterator[str]:
    with serving(engine, max_body_bytes=2000) as url:
        yield url


@pytest.fixture(scope="module")
def hurried(engine: LocalEngine) -> Iterator[str]:
    """The same with a time limit."""
    with serving(engine, request_timeout_s=LIMIT_S) as url:
        yield url


@pytest.fixture
def halted(engine: LocalEngine) -> Iterator[LocalEngine]:
    """No round runs: what comes waits."""
    engine.go.clear()
    try:
        yield engine
    finally:
        engine.go.set()


def post(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=ASK | fields, timeout=60)


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def health(url: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/health").json()
    return found


def test_a_full_queue_is_429_and_who_comes_again_is_served(url: str, halted: LocalEngine) -> None:
    with ThreadPoolExecutor(3) as pool:
        queued = [pool.submit(post, url) for _ in range(2)]
        wait_until(lambda: health(url)["waiting"] == 2)
        for fields in ({}, {"stream": True}):
            refused = post(url, **fields)
            assert code(refused) == (429, "queue_full")
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "rate_limit_error"
        patient = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=4)
        last = pool.submit(patient.completions.create, model=MODEL, **ASK)
        time.sleep(0.2)
        halted.go.set()
        assert [answer.result().status_code for answer in queued] == [200, 200]
        assert last.result().usage.completion_tokens == 4


def test_choices_that_do_not_all_fit_are_refused_together(url: str, halted: LocalEngine) -> None:
    assert code(post(url, n=3)) == (429, "queue_full")
    halted.go.set()
    wait_until(lambda: health(url)["waiting"] == 0 and health(url)["free"])


@pytest.mark.parametrize("fields", [{"n": 2}, {"stream": True}])
def test_a_request_that_takes_too_long_is_408(hurried: str, halted: LocalEngine, fields: dict[str, Any]) -> None:
    began = time.monotonic()
    answer = post(hurried, **fields)
    assert code(answer) == (408, "request_timeout")
    assert time.monotonic() - began >= LIMIT_S
    assert f"{LIMIT_S:g} s" in answer.json()["error"]["message"]
    halted.go.set()
    wait_until(lambda: health(hurried)["waiting"] == health(hurried)["running"] == 0 and health(hurried)["free"])


def test_in_time_a_limit_changes_nothing(hurried: str) -> None:
    assert post(hurried, max_tokens=1).status_code == 200


def test_a_stream_that_takes_too_long_ends_with_the_reason(hurried: str, engine: LocalEngine) -> None:
    ask = ASK | ASCII | {"max_tokens": 200, "stream": True}
    with httpx.stream("POST", f"{hurried}/v1/completions", json=ask) as answer:
        lines = (line for line in answer.iter_lines() if line)
        assert answer.status_code == 200 and "error" not in next(lines)
        engine.go.clear()
        *_, last, done = lines
    engine.go.set()
    assert '"code": "request_timeout"' in last and done == "data: [DONE]"
    wait_until(lambda: health(hurried)["running"] == 0)


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_a_service_that_is_not_ready_is_503(url: str, engine: LocalEngine, fields: dict[str, Any]) -> None:
    engine.away = NotReady("the target is loading")
    try:
        answer = post(url, **fields)
    finally:
        engine.away = None
    assert code(answer) == (503, "not_ready")
    assert answer.headers["retry-after"] == "5"
    assert answer.json()["error"]["message"] == "the target is loading"


@pytest.mark.parametrize("path", ["v1/completions", "v1/chat/completions", "tokenize", "detokenize"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_413_however_it_comes(url: str, path: str, chunked: bool) -> None:
    content = iter([b" " * 1000] * 3) if chunked else b" " * 3000
    assert code(httpx.post(f"{url}/{path}", content=content)) == (413, "body_too_large")


def test_a_body_that_does_not_come_is_408(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_S", 0.1)
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port or 80), timeout=20) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert client.recv(100).startswith(b"HTTP/1.1 408")


def test_a_burst_leaves_nothing_behind(url: str, engine: LocalEngine) -> None:
    """Twenty at once for two places and a queue of two: each is served or refused, and then all is free."""
    with ThreadPoolExecutor(20) as pool:
        statuses = [answer.status_code for answer in pool.map(lambda _: post(url), range(20))]
    assert set(statuses) <= {200, 429} and statuses.count(200) >= 2
    wait_until(lambda: health(url)["running"] == health(url)["waiting"] == 0 and health(url)["free"])
    assert post(url).status_code == 200
