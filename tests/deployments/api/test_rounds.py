"""`ddtree.return_rounds` of the running service: rounds are exactly the answer, and nothing else of it changes."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import httpx
import pytest

ASKED = {"max_tokens": 32, "temperature": 0, "stream": True}
STORY = {"messages": [{"role": "user", "content": "Count from one to twenty in words. 🎉"}]}
PROMPT = {"prompt": "def fibonacci(n):\n"}
STAGES = {"draft", "build", "verify", "accept", "commit"}


def chunks(server: str, told: bool, budget: int | str, **body: Any) -> list[dict[str, Any]]:
    path = "chat/completions" if "messages" in body else "completions"
    options = {"budget": budget, "return_token_ids": True} | ({"return_rounds": True} if told else {})
    answer = httpx.post(f"{server}/v1/{path}", json=ASKED | body | {"ddtree": options}, timeout=120)
    assert answer.status_code == 200, answer.text
    lines = answer.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def text(found: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in found for choice in chunk["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def rounds(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [chunk["ddtree"]["round"] for chunk in found if "round" in chunk.get("ddtree", {})]


def token_ids(told: list[dict[str, Any]]) -> list[int]:
    ids = []
    for one in told:
        ids += [one["nodes"][node]["id"] for node in one["accepted"]]
        ids += [one["bonus"]["id"]] if one["bonus"] else []
    return ids


@pytest.mark.parametrize("asked", [STORY, PROMPT], ids=["chat", "completion"])
@pytest.mark.parametrize(
    "more",
    [{}, {"temperature": 0.8, "seed": 7}, {"max_tokens": 13}, {"stop": ["five", "if n"]}],
    ids=["greedy", "drawn", "cut", "stopped"],
)
def test_rounds_are_the_tokens_and_change_none(server: str, asked: dict[str, Any], more: dict[str, Any]) -> None:
    told, without = chunks(server, True, 16, **asked, **more), chunks(server, False, 16, **asked, **more)
    found = rounds(told)
    figures = told[-1]["ddtree"]
    assert token_ids(found) == figures["token_ids"] == without[-1]["ddtree"]["token_ids"]
    assert text(told) == text(without)
    assert not rounds(without)

    assert [one["number"] for one in found] == list(range(len(found)))
    assert found[0]["nodes"] == found[0]["accepted"] == [], "the first token is of the prompt's own row"
    assert len(found) == 1 + figures["rounds"]
    assert figures["accepted_tokens"] >= sum(len(one["accepted"]) for one in found) > 0
    assert max(one["budget"] for one in found) == 16
    for before, one in pairwise(found):
        assert set(one["seconds"]) == STAGES and one["seconds"]["verify"] > 0
        root, *nodes = one["nodes"]
        assert root["id"] == before["bonus"]["id"] and root["parent"] is None
        assert len(nodes) <= one["budget"] <= 16
        for node in nodes:
            parent = one["nodes"][node["parent"]]
            assert 0 <= node["probability"] <= 1 and node["score"] <= parent["score"]


def test_texts_of_committed_nodes_are_the_text(server: str) -> None:
    """Bytes that are no whole character apart: those are written out."""
    told = chunks(server, True, "auto", **PROMPT)
    pieces = []
    for one in rounds(told):
        pieces += [one["nodes"][node]["text"] for node in one["accepted"]]
        pieces += [one["bonus"]["text"]] if one["bonus"] else []
    assert "".join(pieces).removesuffix("<|im_end|>") == text(told)


def test_plain_decoding_has_rounds_of_a_root(server: str) -> None:
    told = chunks(server, True, 0, **STORY)
    found = rounds(told)
    assert token_ids(found) == told[-1]["ddtree"]["token_ids"]
    assert [len(one["nodes"]) for one in found] == [0] + [1] * (len(found) - 1)
    assert len(found) == len(token_ids(found))


def test_every_choice_has_its_rounds(server: str) -> None:
    told = chunks(server, True, 8, **STORY, n=2, temperature=0.9, seed=1)
    for index in range(2):
        own = [choice for chunk in told for choice in chunk["choices"] if choice["index"] == index]
        found = [choice["ddtree"]["round"] for choice in own if "round" in choice.get("ddtree", {})]
        assert token_ids(found) == own[-1]["ddtree"]["token_ids"]


def test_a_whole_answer_has_no_rounds(server: str) -> None:
    body = ASKED | STORY | {"stream": False, "ddtree": {"return_rounds": True}}
    answer = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "ddtree.return_rounds" and "stream: true" in error["message"]
