"""Both transports between real actors: no token depends on them, and no death or hang of a peer outlasts its deadline."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import ray
import torch

from benchmarks.pod import WAIT_S, Handle, Pod
from ddtree.deployments.config import ApiConfig
from ddtree.deployments.errors import NotReady
from ddtree.deployments.router_deployment import make_router

from . import tiny_pod
from .tiny import request

pytestmark = pytest.mark.cluster
TRANSPORTS = ("mailbox", "objects")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
    yield
    ray.shutdown()


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(
    scope="module",
    params=[f"{t}-cpu" for t in TRANSPORTS] + [pytest.param(f"{t}-cuda", marks=on_gpu) for t in TRANSPORTS],
)
def pod(request: pytest.FixtureRequest, cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    transport, device = request.param.split("-")
    pod = tiny_pod.start(tmp_path_factory.mktemp("pod"), device, transport=transport)
    pod.add_drafter()
    yield pod
    pod.end()


def test_speculative_is_plain(pod: Pod) -> None:
    asked = [request(f"r{i}", [3 * i, 5, 7 + i], 40, 63, 0.9 * (i % 2)) for i in range(6)]
    plain = [pod.ask(replace(r, request_id=f"plain-{r.request_id}", budget=0))[0] for r in asked]
    answers = pod.ask_all(asked)
    assert [tokens for tokens, _ in answers] == plain
    assert pod.status()["transport"] == pod.config.transport
    stats = [last.stats for _, last in answers if last.stats]
    assert sum(s.fallback_rounds for s in stats) == 0
    assert sum(s.accepted_tokens for s in stats) > 20, "drafts are taken"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_drafter_that_dies_or_hangs_costs_no_token(pod: Pod, how: signal.Signals) -> None:
    asked = request(f"drafter-{how}", [9, 8, 7], 120, 16)
    plain = pod.ask(replace(asked, request_id=f"plain-{how}", budget=0))[0]
    drafter = list(pod.drafters.values())[-1]
    pid, struck = ray.get(drafter.pid.remote()), []

    def strike(tokens: int) -> None:
        if tokens > 20 and not struck:
            struck.append(time.monotonic())
            os.kill(pid, how)

    tokens, last = pod.ask(asked, strike)
    assert tokens == plain
    assert last.stats and last.stats.fallback_rounds > 0
    assert pod.status()["drafters"] == []
    assert time.monotonic() - struck[0] < pod.config.drafter.timeout_s * (how == signal.SIGSTOP) + 5
    if how == signal.SIGSTOP:
        os.kill(pid, signal.SIGKILL)
    pod.add_drafter()
    tokens, last = pod.ask(replace(asked, request_id=f"again-{how}"))
    assert tokens == plain and last.stats and last.stats.fallback_rounds == 0


def test_a_verifier_that_dies_is_met_anew(pod: Pod) -> None:
    asked = request("verifier", [6, 5, 4], 120, 16)
    plain = pod.ask(replace(asked, request_id="verifier-plain", budget=0))[0]
    pid, struck = ray.get(pod.group.pid.remote()), []

    def strike(tokens: int) -> None:
        if tokens > 20 and not struck:
            struck.append(tokens)
            os.kill(pid, signal.SIGKILL)

    tokens, last = pod.ask(asked, strike)
    assert tokens == plain and struck
    before = pod.status()["accepted_tokens"]
    tokens, last = pod.ask(replace(asked, request_id="verifier-again"))
    assert tokens == plain and last.stats and last.stats.fallback_rounds == 0, "drafters read the new one's features"
    assert pod.status()["accepted_tokens"] > before


def test_a_router_that_dies_leaves_nothing_behind(pod: Pod) -> None:
    """The contexts of its sequences, which nobody is left to release."""
    for name in [name for name in pod.drafters if name not in pod.status()["drafters"]]:
        del pod.drafters[name]  # killed by a test
    (drafter,) = pod.drafters.values()
    asked = request("router", [4, 3, 2], 120, 16)
    plain = pod.ask(replace(asked, request_id="router-plain", budget=0))[0]

    def strike(tokens: int) -> None:
        if tokens > 20:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        pod.ask(asked, strike)
    assert ray.get(drafter.sequences.remote()) == 1
    pod.replace_router()
    assert ray.get(drafter.sequences.remote()) == 0
    tokens, last = pod.ask(asked)
    assert tokens == plain and last.stats and last.stats.fallback_rounds == 0


def test_requests_wait_only_so_long_for_a_verifier(pod: Pod) -> None:
    """Then they end, and new ones are refused at once, until there is one."""
    if pod.config.transport == "objects":
        pytest.skip("a matter of the router alone")
    late, patience = tiny_pod.Late.remote(pod.group), 1.0  # type: ignore[attr-defined]
    ray.kill(pod.router)
    config = pod.config.model_copy(update={"api": ApiConfig(verifier_wait_s=patience)})
    pod.router = make_router(config, pod.models, Handle(late))
    ray.get(pod.router.pid.remote(), timeout=WAIT_S)

    def refused() -> float:
        begin = time.monotonic()
        with pytest.raises(NotReady, match="no verifier for 1 s"):
            pod.ask(request("early", [1, 2, 3], 10, 0))
        return time.monotonic() - begin

    assert refused() < patience + 3 and refused() < 0.5
    assert pod.status()["waiting"] == 0 and not pod.status()["verifier_connected"]
    ray.get(late.come.remote())
    pod.wait(lambda status: bool(status["verifier_connected"]))
    assert len(pod.ask(request("late", [1, 2, 3], 10, 0))[0]) == 10
