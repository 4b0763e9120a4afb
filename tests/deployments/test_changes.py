"""A running service changes under load: drafters and pods come, go and die, and everything is deployed anew. No request fails, no
token changes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from ddtree.deployments.config import AppConfig
from ddtree.deployments.device_actors import unpack
from ddtree.deployments.errors import NotReady
from ddtree.deployments.requests import Delta, GenerationRequest
from ddtree.deployments.router_client import RouterEngine

from .tiny_service import WAIT_S, Service, running

pytestmark = pytest.mark.cluster
PROMPTS = ["Once upon a time", "def main():", "0 1 2 3 5 8", "To be, or not"]
LENGTH = 150
HELD = 2  # sequences a drafter
SOON = {"look_back_period_s": 1.0, "metrics_interval_s": 0.2, "upscale_delay_s": 0.2, "downscale_delay_s": 0.5}
Plain = dict[str, list[int]]
PAGE = 16  # tokens; of the configuration
CHANGED = {"budget": 5, "max_budget": 7}  # of the tree


def drafters(fewest: int, most: int) -> dict[str, Any]:
    """Options of a deployment with so many."""
    autoscaling = {"min_replicas": fewest, "max_replicas": most, "target_ongoing_requests": HELD, **SOON}
    return {"name": "Drafter", "autoscaling_config": autoscaling}


def pods(number: int) -> list[dict[str, Any]]:
    """Options of the deployments of so many, with a drafter each."""
    return [{"name": name, "num_replicas": number} for name in ("Router", "Verifier", "Drafter")]


def drafting(number: int) -> Callable[[dict[str, Any]], bool]:
    """So many drafters are there."""
    return lambda status: len(status["drafters"]) == number


def complete(number: int) -> Callable[[dict[str, Any]], bool]:
    """So many pods are there, each with its verifier and its drafter."""
    return lambda status: [len(pod["drafters"]) for pod in status["pods"] if pod["verifier_connected"]] == [1] * number


def until(seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("service"), drafters(1, 1)) as made:
        yield made


@pytest.fixture(scope="module")
def plain(service: Service) -> Plain:
    """The tokens of plain decoding, by prompt."""
    return {prompt: service.ask(prompt, LENGTH, budget=0)["ddtree"]["token_ids"] for prompt in PROMPTS}


@contextmanager
def load(service: Service, plain: Plain) -> Iterator[list[dict[str, Any]]]:
    """Streams one after another for each prompt, as long as the block runs; afterwards the figures of all. None may fail, and
    all have the tokens of plain decoding."""
    stop, figures = threading.Event(), list[dict[str, Any]]()

    def stream(prompt: str) -> None:
        while not stop.is_set():
            figures.append(service.ask(prompt, LENGTH)["ddtree"])
            assert figures[-1]["token_ids"] == plain[prompt]

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        streams = [pool.submit(stream, prompt) for prompt in PROMPTS]
        try:
            yield figures
        finally:
            stop.set()
        for one in streams:
            one.result()


def test_the_number_of_drafters_changes_under_load(service: Service, plain: Plain) -> None:
    first, rounds = service.health()["drafters"], service.health()["rounds"]
    with load(service, plain) as figures:
        service.deploy(drafters(2, 2))
        assert set(first) < set(service.wait(drafting(2))["drafters"]), "nobody restarts"
        service.deploy(drafters(1, 1))
        status = service.wait(drafting(1))
    assert status["rounds"] > rounds, "neither does the router"
    assert status["moves"] >= 2 and status["moved_rows"] > 0
    assert sum(f["fallback_rounds"] for f in figures) == 0, "a drafter that leaves drafts until it is replaced"


def test_load_brings_a_drafter_and_takes_it_away(service: Service, plain: Plain) -> None:
    service.deploy(drafters(1, 2))
    with load(service, plain):
        service.wait(drafting(2))
    service.wait(drafting(1))


def test_another_budget_replaces_nothing(service: Service, plain: Plain) -> None:
    rounds = service.health()["rounds"]
    with load(service, plain) as figures:
        service.deploy(drafters(1, 1), {"name": "Ingress", "user_config": {"budget": 24}})
        until(lambda: 24 in {figure["budget"] for figure in figures})
    assert {figure["budget"] for figure in figures} == {16, 24}
    assert service.health()["rounds"] > rounds


def test_everything_is_replaced_and_a_pod_added(service: Service, plain: Plain) -> None:
    """The old router's streams go on at the new ones."""
    before = service.health()["drafters"]
    with load(service, plain) as figures:
        service.deploy(*pods(2), tree=CHANGED)
        service.wait(lambda status: complete(2)(status) and not {*before} & {*status["drafters"]})
        until(lambda: 5 in {figure["budget"] for figure in figures})
    assert {figure["budget"] for figure in figures} <= {24, CHANGED["max_budget"], 5}


def test_a_router_answers_an_ingress_of_another_configuration(service: Service, plain: Plain) -> None:
    """One that is about to be replaced: with as many nodes as there is room for, unless it had another target."""
    target = AppConfig.parse(service.arguments()).target.key
    asked = GenerationRequest("old", tuple(PROMPTS[0].encode()), LENGTH, budget=63)

    async def ask(target: str) -> list[Delta]:
        router = RouterEngine(serve.get_deployment_handle("Router", "ddtree"), resubmit_s=30, target=target)
        return [delta async for delta in router.generate(asked)]

    deltas = asyncio.run(ask(target))
    assert [token for delta in deltas for token in delta.token_ids] == plain[PROMPTS[0]]
    stats = deltas[-1].stats
    assert stats and stats.budget == CHANGED["max_budget"] and stats.accepted_tokens > 0
    with pytest.raises(NotReady, match="another target is served now"):
        asyncio.run(ask("another"))


def test_a_verifier_serves_the_router_that_claimed_it(service: Service) -> None:
    config = AppConfig.parse(service.arguments(tree=CHANGED))
    routers, verifiers = (serve.get_deployment_handle(name, "ddtree") for name in ("Router", "Verifier"))
    found = [pod.router for pod in routers.broadcast("pod", config).results(timeout_s=30)]
    groups = [verifiers.broadcast("ranks", config, router).results(timeout_s=30) for router in found]
    own = [[unpack(ranks)[0] for ranks in answers if ranks is not None] for answers in groups]
    assert [len(answers) for answers in groups] == [2, 2] and [len(ranks) for ranks in own] == [1, 1]
    assert own[0] != own[1]
    other = AppConfig.parse(service.arguments())
    assert verifiers.broadcast("ranks", other, found[0]).results(timeout_s=30) == [None, None], "another configuration"
    assert routers.broadcast("pod", other).results(timeout_s=30) == [None, None]


def test_a_beginning_stays_with_its_pod_and_others_spread(service: Service) -> None:
    before = [pod["generated_tokens"] for pod in service.health()["pods"]]
    tales = [f"{i} {'tell me a story ' * 4}" for i in range(24)]  # so that chance alone gives no pod all of them
    for tale in tales:
        assert cached(service.ask(tale, 4, budget=0)) == 0
    grown = [pod["generated_tokens"] > old for pod, old in zip(service.health()["pods"], before, strict=True)]
    assert grown == [True, True], "each pod had some"
    for tale in tales:
        assert cached(service.ask(tale + "and another", 4, budget=0)) == len(tale) // PAGE * PAGE
    assert len(service.ask(tales, 4)["choices"]) == len(tales), "at once, of one request"


def test_one_scrape_shows_every_pod(service: Service) -> None:
    service.ask("once more", 4)
    text = httpx.get(f"{service.url}/metrics", timeout=30).text
    families = {family.name: family.samples for family in text_string_to_metric_families(text)}
    tokens = {sample.labels["engine"]: sample.value for sample in families["vllm:generation_tokens"]}
    assert set(tokens) == {"0", "1"}
    assert sorted(tokens.values()) == sorted(pod["generated_tokens"] for pod in service.health()["pods"])
    assert [sample.value for sample in families["ddtree:budget"]] == [CHANGED["budget"]] * 2


def cached(answer: dict[str, Any]) -> int:
    number: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


def test_a_pod_dies_and_the_other_finishes_its_requests(service: Service, plain: Plain) -> None:
    routers = serve.get_deployment_handle("Router", "ddtree")
    with load(service, plain):
        service.wait(lambda status: min(pod["running"] for pod in status["pods"]) > 0)
        (actor, _), _ = routers.broadcast("pids").results(timeout_s=30)
        os.kill(actor, signal.SIGKILL)
        service.wait(lambda status: len(status["pods"]) == 1)
        service.deploy(*pods(1), tree=CHANGED)
        service.wait(complete(1))
