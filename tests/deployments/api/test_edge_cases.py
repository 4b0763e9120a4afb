"""Edge cases that broke other servers, over HTTP with a drafter that errs: what is cut, drawn and delivered is what plain
decoding gives, and what befalls one request leaves the others alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

from ..tiny import Guesser
from .served import ASCII, CONTEXT, ByName, LocalEngine, serving

BUDGET = 15
PROMPT = "Once upon a time"


class Service:
    """Asks plain first, so that the drafter knows most of what is asked with drafts."""

    def __init__(self, url: str, engine: LocalEngine, known: ByName) -> None:
        self.url, self.engine, self._known = url, engine, known

    def post(self, name: str, **fields: Any) -> httpx.Response:
        ask = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ddtree": {"return_token_ids": True}} | fields
        headers = {"x-request-id": name}
        return httpx.post(f"{self.url}/v1/completions", json=ask, headers=headers, timeout=120)

    def plain(self, name: str, **fields: Any) -> dict[str, Any]:
        """The answer without drafts."""
        answer: dict[str, Any] = self.post("plain", **fields).json()
        prompt = fields.get("prompt", PROMPT)
        ids = prompt if isinstance(prompt, list) else list(prompt.encode())
        self._known[name] = [*ids, *answer["ddtree"]["token_ids"]]
        return answer

    def drafted(self, name: str, **fields: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.post(name, **fields, ddtree={"budget": BUDGET, "return_token_ids": True}).json()
        return answer

    def wait_until_free(self) -> None:
        deadline = time.monotonic() + 20
        while True:
            health = httpx.get(f"{self.url}/health").json()
            if health["free"] and health["running"] == health["waiting"] == 0:
                return
            assert time.monotonic() < deadline, health
            time.sleep(0.02)


def ids(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["ddtree"]["token_ids"]
    return found


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    engine, known = LocalEngine(tmp_path_factory.mktemp("target")), ByName()
    engine.loop.add_drafter(Guesser("d", known, seed=0, errs=0.15))
    with serving(engine) as url:
        yield Service(url, engine, known)


def test_the_first_stop_token_inside_an_accepted_path_ends_it(service: Service) -> None:
    """Also where the limit lies further inside the same path."""
    tokens = ids(service.plain("stops"))
    cut = False
    for n in range(3, 10):
        if tokens[n - 1] in tokens[: n - 1]:
            continue
        answer = service.drafted("stops", stop_token_ids=[tokens[n - 1]], max_tokens=n + 2)
        assert ids(answer) == tokens[:n]
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == n
        cut |= answer["ddtree"]["accepted_tokens"] + answer["ddtree"]["rounds"] + 1 > n
    assert cut, "no path went past its stop token"


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": -2},
        {"frequency_penalty": 2},
        {"temperature": 2, "seed": 42},
        {"temperature": 1e-6, "seed": 1},
        {"temperature": 1, "seed": 3, "top_p": 0},
        {"temperature": 1, "seed": 3, "top_p": 1, "min_tokens": 16},
        {"temperature": 1, "seed": 5, "ignore_eos": True},
    ],
    ids=str,
)
def test_drafts_change_nothing(service: Service, fields: dict[str, Any]) -> None:
    plain = service.plain(str(fields), **fields)
    drafted = service.drafted(str(fields), **fields)
    assert ids(drafted) == ids(plain)
    assert drafted["choices"][0] == plain["choices"][0]
    assert drafted["ddtree"]["accepted_tokens"] > 0


def test_penalties_of_either_sign_show(service: Service) -> None:
    assert len({tuple(ids(service.plain("sign", frequency_penalty=penalty))) for penalty in (-2, 2)}) == 2


def test_a_seed_at_temperature_two_repeats_beside_who_has_none(service: Service) -> None:
    seeded: dict[str, Any] = {"temperature": 2, "seed": 42}
    alone = ids(service.plain("seeded", **seeded))
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(service.drafted, "nobody", temperature=2) for _ in range(3)]
        again = [pool.submit(service.drafted, "seeded", **seeded) for _ in range(3)]
        assert [ids(answer.result()) for answer in again] == [alone] * 3
        assert len({tuple(ids(answer.result())) for answer in others}) == 3


def test_a_prompt_one_short_of_the_context_gets_one_token(service: Service) -> None:
    prompt = [65] * (CONTEXT - 1)
    plain = service.plain("long", prompt=prompt, max_tokens=1)
    for fields in ({}, {"max_tokens": 1}):
        answer = service.drafted("long", prompt=prompt, **fields or {"max_tokens": None})
        assert ids(answer) == ids(plain) and len(ids(plain)) == 1
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["total_tokens"] == CONTEXT


def test_one_long_and_four_short_together_equal_their_solo_runs(service: Service) -> None:
    asked = {"long": {"prompt": "x" * 100, "max_tokens": 60}} | {
        f"short{i}": {"prompt": PROMPT[i:], "max_tokens": 8, "temperature": 0.9, "seed": i} for i in range(4)
    }
    solo = {name: ids(service.plain(name, **fields)) for name, fields in asked.items()}
    with ThreadPoolExecutor(5) as pool:
        crowd = {name: pool.submit(service.drafted, name, **fields) for name, fields in asked.items()}
        assert {name: ids(answer.result()) for name, answer in crowd.items()} == solo


def test_a_storm_of_cancellations_leaves_bystanders_alone(service: Service) -> None:
    asked = {f"bystander{i}": {"prompt": PROMPT[i:], "max_tokens": 40} for i in range(2)}
    solo = {name: ids(service.plain(name, **fields)) for name, fields in asked.items()}

    def leave(i: int) -> None:
        ask = {"prompt": f"{i} {PROMPT}", "max_tokens": 200, "stream": True, "n": 1 + i % 3, **ASCII}
        with httpx.stream("POST", f"{service.url}/v1/completions", json=ask, timeout=120) as answer:
            if i % 2:
                next(answer.iter_lines())

    with ThreadPoolExecutor(10) as pool:
        staying = {name: pool.submit(service.drafted, name, **fields) for name, fields in asked.items()}
        storm = [pool.submit(leave, i) for i in range(16)]
        assert {name: ids(answer.result()) for name, answer in staying.items()} == solo
        for left in storm:
            left.result()
    service.wait_until_free()


def poisoned(service: Service, name: str) -> Callable[[], None]:
    """What makes the rows of a running request not finite, and lets rounds run again."""

    def poison() -> None:
        deadline = time.monotonic() + 20
        while not (found := [s for s in service.engine.scheduler.running if s.id.startswith(name) and s.generated]):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        service.engine.go.clear()
        time.sleep(0.3)  # the round that runs ends
        pool = service.engine.verifier.target.pool
        pool.k[:, found[0].pages[0]] = torch.nan
        service.engine.go.set()

    return poison


@pytest.mark.parametrize("stream", [False, True])
def test_logits_that_are_not_finite_fail_their_request_alone(service: Service, stream: bool) -> None:
    good: dict[str, Any] = {"prompt": "and good", "max_tokens": 150}
    solo = ids(service.plain("good", **good))
    with ThreadPoolExecutor(3) as pool:
        bad = pool.submit(service.post, "bad", prompt=f"{stream} bad", max_tokens=200, stream=stream, ignore_eos=True)
        other = pool.submit(service.drafted, "good", **good)
        poisoned(service, "bad")()
        answer = bad.result()
        assert ids(other.result()) == solo
    assert "logits for this request are not finite" in answer.text
    if stream:
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    service.wait_until_free()
    service.engine.verifier.target.pool.k.nan_to_num_()
