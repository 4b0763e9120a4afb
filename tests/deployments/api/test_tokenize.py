"""/tokenize and /detokenize over HTTP, on the tokenizer and the template of the real model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from .served import CONTEXT, VOCABULARY, LocalEngine, serving

USER = {"role": "user", "content": "Hi there"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[str]:
    with serving(LocalEngine(tmp_path_factory.mktemp("target")), tokenizer) as url:
        yield url


@pytest.mark.parametrize("text", ["", "The sun is", "안녕, 😀!", "<|im_start|>user"])
def test_a_prompt_there_and_back(url: str, tokenizer: Any, text: str) -> None:
    answer = httpx.post(f"{url}/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    ids = tokenizer(text)["input_ids"]
    strings = tokenizer.convert_ids_to_tokens(ids)
    assert answer == {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids, "token_strs": strings}
    known = [token for token in ids if token < VOCABULARY]
    back = httpx.post(f"{url}/detokenize", json={"tokens": known}).json()
    assert back == {"prompt": tokenizer.decode(known)}


def test_messages_are_what_a_chat_sends_to_the_model(url: str, tokenizer: Any) -> None:
    answer = httpx.post(f"{url}/tokenize", json={"messages": [USER]}).json()
    assert answer["token_strs"] is None
    text = tokenizer.decode(answer["tokens"])
    assert text.endswith("<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n")
    fields = {"messages": [USER], "add_generation_prompt": False}
    shorter = httpx.post(f"{url}/tokenize", json=fields).json()
    assert text.startswith(tokenizer.decode(shorter["tokens"])) and shorter["count"] < answer["count"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("tokenize", {}, 400, "prompt"),
        ("tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("tokenize", {"prompt": "a", "model": "gpt-9"}, 404, "model"),
        ("tokenize", {"prompt": "a", "messages": [USER]}, 400, "prompt"),
        ("tokenize", {"messages": [USER], "tools": [{"type": "function"}]}, 400, "tools"),
        ("detokenize", {"tokens": [VOCABULARY]}, 400, "tokens"),
        ("detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("detokenize", {}, 400, "tokens"),
    ],
)
def test_bad_requests(url: str, path: str, body: dict[str, Any], status: int, param: str) -> None:
    answer = httpx.post(f"{url}/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
