"""The running service on the real model: lossless, batched, and indifferent to a drafter's death."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import ray
from openai import OpenAI
from ray import serve

from ddtree.deployments.commands.prompts import read_prompts
from ddtree.deployments.requests import Budget

from ..conftest import REPOSITORY, Deployment

PROMPTS = read_prompts(REPOSITORY / "tests/data/prompts.jsonl", None)


def ask(url: str, prompt: str, budget: Budget, max_tokens: int = 40, **more: Any) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ddtree": {"budget": budget, "return_token_ids": True},
        **more,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    figures: dict[str, Any] = answer.json()["ddtree"]
    return figures


@pytest.fixture(scope="module")
def cluster(deployment: Deployment) -> Iterator[None]:
    """This process as a client of the service's Ray cluster."""
    ray.init(address="auto", log_to_driver=False)
    yield
    ray.shutdown()


def health(url: str) -> dict[str, Any]:
    status: dict[str, Any] = httpx.get(f"{url}/health", timeout=30).json()
    return status


def test_paris(server: str) -> None:
    client = OpenAI(base_url=f"{server}/v1", api_key="none")
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
    )
    assert "Paris" in (answer.choices[0].message.content or "")


@pytest.mark.parametrize("prompt", PROMPTS[:5], ids=lambda p: p[:20])
def test_greedy_is_plain_and_drafts_pay(server: str, prompt: str) -> None:
    plain, drafted = ask(server, prompt, 0), ask(server, prompt, 16)
    assert drafted["token_ids"] == plain["token_ids"]
    assert drafted["rounds"] <= plain["rounds"]
    assert drafted["fallback_rounds"] == 0


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.8}, {"temperature": 1.2, "top_p": 0.9}, {"temperature": 0.8, "top_k": 20}]
)
def test_sampled_is_plain_with_the_same_seed(server: str, sampling: dict[str, float]) -> None:
    for seed, prompt in enumerate(PROMPTS[8:10]):
        budgets: tuple[Budget, ...] = (0, 8, 63, "auto")
        plain, drafted, wide, auto = (ask(server, prompt, budget, 24, seed=seed, **sampling) for budget in budgets)
        assert drafted["token_ids"] == plain["token_ids"] == wide["token_ids"] == auto["token_ids"]
    assert ask(server, prompt, 8, 24, seed=99, **sampling)["token_ids"] != plain["token_ids"]


def test_eight_at_once_equal_their_solo_runs(server: str) -> None:
    budgets: list[Budget] = [0, 16, 8, 32, "auto", 63, 4, "auto"]
    jobs = [(PROMPTS[11 + i], budget, 0.8 if i % 2 else 0.0) for i, budget in enumerate(budgets)]

    def run(job: tuple[str, int, float]) -> list[int]:
        ids: list[int] = ask(server, job[0], job[1], 24, temperature=job[2], seed=5)["token_ids"]
        return ids

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(run, jobs)) == [run(job) for job in jobs]


def stream(url: str, prompt: str, budget: int, max_tokens: int) -> tuple[str, dict[str, Any]]:
    """The text of a streaming answer and its figures."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    text, figures = "", {}
    for chunk in client.chat.completions.create(
        model="smollm2-135m-instruct",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        extra_body={"ddtree": {"budget": budget}},
    ):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        figures = getattr(chunk, "ddtree", None) or figures
    return text, figures


def test_a_killed_drafter_costs_no_token(server: str, cluster: None) -> None:
    prompt = "Write a long story about a lighthouse keeper and the sea."
    expected, _ = stream(server, prompt, 0, 120)
    before = health(server)["drafters"]
    drafter = serve.get_deployment_handle("Drafter", "ddtree")
    pid = drafter.pid.remote().result(timeout_s=30)

    def kill() -> None:
        time.sleep(0.7)
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    text, figures = stream(server, prompt, 16, 120)
    killer.join()
    assert text == expected
    assert figures["fallback_rounds"] > 0, "it was killed in the middle"
    assert figures["accepted_tokens"] > 0
    deadline = time.monotonic() + 90
    while health(server)["drafters"] in ([], before):
        assert time.monotonic() < deadline, "Serve did not replace the drafter"
        time.sleep(1)
    text, figures = stream(server, prompt, 16, 120)
    assert text == expected and figures["fallback_rounds"] == 0


def test_a_client_that_leaves_frees_its_pages(server: str) -> None:
    body = {
        "messages": [{"role": "user", "content": PROMPTS[0]}],
        "max_tokens": 2000,
        "stream": True,
        "temperature": 1.5,
    }
    with httpx.stream("POST", f"{server}/v1/chat/completions", json=body, timeout=60) as stream:
        for i, _ in enumerate(stream.iter_lines()):
            if i > 4:
                break
    deadline = time.monotonic() + 20
    while (status := health(server))["running"] or status["kv_pages"]["free"] != status["kv_pages"]["total"]:
        assert time.monotonic() < deadline, status
        time.sleep(0.3)
