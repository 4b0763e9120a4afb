"""Random requests over all parameters, over HTTP: with drafts the answer is the plain one, token for token, and its
log-probabilities are the same to 1e-4."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..tiny import Guesser
from .served import VOCABULARY, ByName, LocalEngine, serving

REQUESTS = int(os.environ.get("DDTREE_REQUESTS", 60))  # in CI
BUDGET = 8
tokens = st.integers(0, VOCABULARY - 1)
letters = st.text("abcde \n", min_size=1, max_size=3)
penalty = st.sampled_from([-2.0, -0.5, 0.7, 2.0])
CONSTRAINTS: list[dict[str, Any]] = [
    {},
    {"structured_outputs": {"regex": "[a-f]{2,9}"}},
    {"structured_outputs": {"choice": ["yes", "yellow", "no"]}},
    {"guided_json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"response_format": {"type": "json_object"}},
]
REQUIRED: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.one_of(st.lists(tokens, min_size=1, max_size=24), st.just("Once upon a time")),
    "max_tokens": st.integers(1, 14),
    "temperature": st.sampled_from([0, 0.5, 1, 1.7]),
    "seed": st.integers(0, 9),
}
OPTIONAL: dict[str, st.SearchStrategy[Any]] = {
    "top_p": st.sampled_from([0, 0.3, 0.9, 1]),
    "top_k": st.sampled_from([-1, 1, 5, 40]),
    "min_p": st.sampled_from([0, 0.05, 0.5]),
    "presence_penalty": penalty,
    "frequency_penalty": penalty,
    "repetition_penalty": st.sampled_from([0.5, 1, 1.3]),
    "logit_bias": st.dictionaries(tokens.map(str), st.sampled_from([-100, -3, 5, 100]), max_size=4),
    "stop": st.lists(letters, min_size=1, max_size=3),
    "stop_token_ids": st.lists(tokens, min_size=1, max_size=20),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "n": st.sampled_from([1, 1, 3]),
    "logprobs": st.sampled_from([0, 1, 5]),
    "prompt_logprobs": st.sampled_from([0, 2]),
    "echo": st.booleans(),
    "return_tokens_as_token_ids": st.booleans(),
}


def requests(number: int) -> st.SearchStrategy[dict[str, Any]]:
    """With any of the optional fields, but for those that those of this number always have."""
    always = dict(list(OPTIONAL.items())[number :: len(CONSTRAINTS)])
    rest = {name: values for name, values in OPTIONAL.items() if name not in always}
    return st.fixed_dictionaries(REQUIRED | always, optional=rest)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    return LocalEngine(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def known(engine: LocalEngine) -> ByName:
    answers = ByName()
    engine.loop.add_drafter(Guesser("errs", answers, seed=0))
    return answers


@pytest.fixture(scope="module")
def url(engine: LocalEngine) -> Iterator[str]:
    with serving(engine) as base:
        yield base


def test_drafts_change_no_answer(url: str, known: ByName) -> None:
    seen: Counter[str] = Counter()

    def compare(bound: dict[str, Any], asked: dict[str, Any], least: bool) -> None:
        asked = asked | bound | ({"min_tokens": asked["max_tokens"] // 2} if least else {})
        plain = ask(url, "plain", 0, asked)
        prompt = asked["prompt"] if isinstance(asked["prompt"], list) else list(asked["prompt"].encode())
        known["drafted"] = [*prompt, *figures(plain)["token_ids"]]
        drafted = ask(url, "drafted", BUDGET, asked)
        assert differs(told(plain), told(drafted)) is None
        seen.update(list(asked))
        seen["accepted tokens"] += figures(drafted)["accepted_tokens"] or 0

    for number, bound in enumerate(CONSTRAINTS):
        several = settings(max_examples=REQUESTS // len(CONSTRAINTS), deadline=None)
        several(given(st.just(bound), requests(number), st.booleans())(compare))()
    assert seen["accepted tokens"] > REQUESTS / 2
    assert all(seen[field] > REQUESTS / 30 for field in (*OPTIONAL, "guided_json", "response_format", "min_tokens"))


def ask(url: str, name: str, budget: int, asked: dict[str, Any]) -> dict[str, Any]:
    body = asked | {"ddtree": {"budget": budget, "return_token_ids": True}}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"x-request-id": name}, timeout=120)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def figures(answer: dict[str, Any]) -> dict[str, Any]:
    """Of the first choice."""
    found: dict[str, Any] = answer.get("ddtree") or answer["choices"][0]["ddtree"]
    return found


def told(answer: dict[str, Any]) -> dict[str, Any]:
    """What may not depend on drafts."""
    choices = [{**choice, "ddtree": None} for choice in answer["choices"]]
    ids = [(choice.get("ddtree") or answer["ddtree"])["token_ids"] for choice in answer["choices"]]
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return {"choices": choices, "ids": ids, "usage": usage}


def differs(a: Any, b: Any) -> str | None:
    """The first place where two JSON values differ, numbers with a fraction by more than 1e-4."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next((f"{key}: {why}" for key in a if (why := differs(a[key], b[key]))), None)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return next((f"[{i}] {why}" for i, (x, y) in pairs if (why := differs(x, y))), None)
    same = abs(a - b) <= 1e-4 if isinstance(a, float) and isinstance(b, float) else a == b
    return None if same else f"{json.dumps(a)} is not {json.dumps(b)}"
