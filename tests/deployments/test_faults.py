"""The running service loses processes, and no client notices: every answer is the one of an undisturbed run, token for token.

`python -m benchmarks.chaos` does the same for longer.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import httpx
import pytest
import ray
from ray import serve
from ray.exceptions import RayTaskError

from benchmarks.chaos.findings import leaks
from benchmarks.chaos.monkey import Monkey
from ddtree.deployments.api.errors import from_engine
from ddtree.deployments.commands.prompts import read_prompts
from ddtree.deployments.device_actors import pack
from ddtree.deployments.errors import NotReady
from ddtree.deployments.lines import Address, Item, Line
from ddtree.deployments.requests import Delta, GenerationRequest
from ddtree.deployments.router_client import RouterEngine
from ddtree.deployments.scheduler import QueueFull

from ..conftest import REPOSITORY, Deployment

PROMPTS = read_prompts(REPOSITORY / "tests/data/prompts.jsonl", None)
TALES = [f"Write a long story about {what}." for what in ("a lighthouse keeper", "two dragons", "the last train home")]
LENGTH, TIMEOUT_S = 40, 90
WAVES = [  # of kills, each at once; the next one when all is there again and every stream moves
    ("drafter actor", "verifier rank", "router replica"),
    ("drafter replica", "router actor", "verifier replica"),
]
GREEDY, SEEDED = {"temperature": 0}, {"temperature": 0.9, "seed": 11}


def body(prompt: str, budget: int, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": prompt}], "max_tokens": LENGTH, "stream": True,
        "stream_options": {"include_usage": True}, "ddtree": {"budget": budget, "return_token_ids": True}, **more,
    }  # fmt: skip


def stream(url: str, asked: dict[str, Any], at: Callable[[int], None] = lambda chunks: None) -> dict[str, Any]:
    """What a streaming client got; `at` is called with the number of chunks so far."""
    text, chunks, last, reason = "", 0, {}, None
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=asked, timeout=TIMEOUT_S) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                text += choice["delta"].get("content", "")
                reason = choice["finish_reason"] or reason
            last |= {name: chunk[name] for name in ("usage", "ddtree") if chunk.get(name)}
            chunks += 1
            at(chunks)
    return {"text": text, "reason": reason, **last}


def whole(url: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The same of a client that does not stream."""
    asked = {**asked, "stream": False, "stream_options": None}
    answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    got = answer.json()
    choice = got["choices"][0]
    figures = {"usage": got["usage"], "ddtree": got["ddtree"]}
    return {"text": choice["message"]["content"], "reason": choice["finish_reason"], **figures}


def seen(answer: dict[str, Any]) -> tuple[Any, ...]:
    """What may not depend on who served it."""
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return answer["text"], answer["ddtree"]["token_ids"], answer["reason"], usage


def check_figures(answer: dict[str, Any]) -> None:
    figures = answer["ddtree"]
    assert sum(figures["acceptance_histogram"]) == figures["rounds"]
    assert sum(i * n for i, n in enumerate(figures["acceptance_histogram"])) == figures["accepted_tokens"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] <= answer["usage"]["prompt_tokens"]


class Router:
    """The pod's router, to be killed."""

    def __init__(self) -> None:
        self._handle = serve.get_deployment_handle("Router", "ddtree")

    def pids(self) -> tuple[int, int]:
        """Of the actor and of its replica."""
        pids: tuple[int, int] = self._handle.pids.remote().result(timeout_s=60)
        return pids

    def wait(self, until: Callable[[dict[str, Any]], bool]) -> None:
        """Asks the router itself, without a pause: on two busy cores a request through the ingress takes seconds."""
        deadline = time.monotonic() + 60
        while not until(status := self._handle.status.remote().result(timeout_s=60)):
            assert time.monotonic() < deadline, status


@pytest.fixture(scope="module")
def router(server: str) -> Iterator[Router]:
    ray.init(address="auto", log_to_driver=False)
    yield Router()
    ray.shutdown()


def test_every_kind_of_process_killed_under_streams(deployment: Deployment, router: Router) -> None:
    """Greedy and seeded, drafted and not, with a stop string and without, and a client that waits for a whole answer."""
    url = deployment.url
    asked = [body(TALES[0], 16, **GREEDY), body(TALES[1], 0, **SEEDED), body(TALES[2], 16, **SEEDED)]
    with ThreadPoolExecutor(3) as pool:
        plain = list(pool.map(lambda one: stream(url, one), asked))
    cut = plain[2]["text"][len(plain[2]["text"]) * 4 // 5 :][:6]
    asked.append({**asked[2], "stop": [cut]})
    plain.append(stream(url, asked[3]))
    assert [one["reason"] for one in plain] == ["length", "length", "length", "stop"]
    assert cut not in plain[3]["text"]
    monkey, moved = Monkey(url, deployment.pid, seed=0), [0.0] * len(asked)

    def follow(i: int) -> dict[str, Any]:
        return stream(url, asked[i], lambda chunks: moved.__setitem__(i, time.monotonic()))

    with ThreadPoolExecutor(len(asked) + 1) as pool:
        running = [*(pool.submit(follow, i) for i in range(len(asked))), pool.submit(whole, url, asked[0])]

        def moving_since(moment: float) -> bool:
            return all(at > moment or one.done() for at, one in zip(moved, running, strict=False))

        for wave in WAVES:
            monkey.recover(moving_since)
            for kind in wave:
                monkey.strike(kind)
        assert not running[1].done(), "the one without drafts takes longest and lives through all of it"
        answers = [one.result() for one in running]
    monkey.recover()
    assert [seen(answer) for answer in answers] == [seen(one) for one in [*plain, plain[0]]]
    for answer in answers:
        check_figures(answer)
    assert leaks(monkey) == []
    again = stream(url, {**asked[0], "max_tokens": 16})
    assert again["ddtree"]["token_ids"] == plain[0]["ddtree"]["token_ids"][:16]
    assert again["ddtree"]["accepted_tokens"] > 0, "the drafter serves the new router"


def test_a_router_killed_in_a_prefill_and_a_client_that_leaves(server: str, router: Router) -> None:
    """The prompt is begun anew; who leaves while no router is there is forgotten."""
    prompt = " ".join(PROMPTS * 3)[:6000]  # takes seconds, so that the router is seen to have it
    asked = body(prompt, 16, **SEEDED, max_tokens=12) | {"ddtree": {"return_token_ids": True, "prefix_cache": False}}
    plain = stream(server, asked)
    killed, first_token = router.pids()[0], threading.Event()
    with ThreadPoolExecutor(1) as pool:
        leaving = body(TALES[0], 0, **GREEDY) | {"max_tokens": 400}
        with httpx.stream("POST", f"{server}/v1/chat/completions", json=leaving, timeout=TIMEOUT_S) as other:
            lines = other.iter_lines()
            next(lines)
            running = pool.submit(stream, server, asked, lambda chunks: first_token.set())
            router.wait(lambda status: status["running"] == 2)
            os.kill(killed, signal.SIGKILL)
            assert not first_token.is_set()
        answer = running.result()
    assert router.pids()[0] != killed
    assert seen(answer) == seen(plain)
    check_figures(answer)
    router.wait(lambda status: not status["running"] and status["kv_pages"]["free"] == status["kv_pages"]["total"])


@ray.remote(num_cpus=0)
class UnwillingActor:
    """A router's actor, and what it has for each request."""

    HAS: ClassVar = {"full": [QueueFull("no room")], "damaged": [Delta(()), Delta((1,)), RuntimeError("not finite")]}

    def __init__(self) -> None:
        self._line = Line()

    async def serve(self, request: GenerationRequest) -> None:
        with self._line.request(request.request_id) as ended:
            for item in self.HAS.get(request.request_id, []):
                self._line.put(request.request_id, item)
            await ended.wait()

    async def deltas(self, line: str) -> AsyncIterator[list[Item]]:
        while items := await self._line.take(TIMEOUT_S):
            yield items


@serve.deployment(ray_actor_options={"num_cpus": 0})
class Unwilling:
    """A router that refuses a request, fails it, or never takes it."""

    def __init__(self) -> None:
        self._asked: list[str] = []
        self._actor = UnwillingActor.remote()  # type: ignore[attr-defined]

    async def generate(self, request: GenerationRequest, line: str) -> AsyncIterator[Address]:
        self._asked.append(request.request_id)
        if request.request_id == "early":
            raise RayTaskError("serve", "in the actor", NotReady("no verifier")).as_instanceof_cause()
        if request.request_id == "deaf":
            await asyncio.sleep(TIMEOUT_S)
        yield Address("unwilling", pack([self._actor]))
        await self._actor.serve.remote(request)

    async def status(self) -> list[str]:
        return self._asked


def test_what_is_the_requests_own_fault_is_not_tried_again(server: str, router: Router) -> None:
    """Nor does a request wait for ever."""
    handle = serve.run(Unwilling.bind(), name="unwilling", route_prefix=None)  # type: ignore[attr-defined]
    engine = RouterEngine(handle, resubmit_s=1)

    async def ask(name: str) -> list[Delta]:
        return [delta async for delta in engine.generate(GenerationRequest(name, (1,), 3))]

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*map(ask, ("full", "early", "damaged", "deaf", "mute")), return_exceptions=True)

    try:
        full, early, damaged, *silent = asyncio.run(all_of_them())
        assert isinstance(full, QueueFull) and from_engine(full).status == 429
        assert isinstance(early, NotReady) and from_engine(early).response().headers["retry-after"] == "5"
        assert isinstance(damaged, RuntimeError) and str(damaged) == "not finite"
        assert all(isinstance(one, NotReady) and "no router took the request for 1 s" in str(one) for one in silent)
        assert sorted(handle.status.remote().result(timeout_s=30)) == ["damaged", "deaf", "early", "full", "mute"]
    finally:
        serve.delete("unwilling")
