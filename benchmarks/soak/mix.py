"""Random requests of every kind, and clients that send them, some of which go away in the middle. Knows the HTTP API alone."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx

WAIT_S = 300
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
Request = tuple[str, dict[str, Any]]  # path, body


class Mix:
    """What is asked. Not for several threads."""

    def __init__(self, prompts: Sequence[str], seed: int) -> None:
        self._prompts, self._random = prompts, random.Random(seed)
        self._kinds = {
            "chat": self._chat, "completion": self._completion, "choices": self._choices, "schema": self._schema,
            "tool": self._tool, "long prompt": self._long, "wrong": self._wrong,
        }  # fmt: skip

    def draw(self) -> tuple[str, Request, int | None]:
        """A kind of request, the request, and after how many chunks the client goes away (None: it stays)."""
        weights = {"chat": 6, "completion": 4}
        kind = self._random.choices(list(self._kinds), [weights.get(kind, 1) for kind in self._kinds])[0]
        path, body = self._kinds[kind]()
        body |= {"stream": self._random.random() < 0.6, "temperature": self._random.choice([0, 0.7, 1.2])}
        leaves = self._random.randrange(8) if body["stream"] and self._random.random() < 0.25 else None
        return kind, (path, body), leaves

    def _messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self._random.choice(self._prompts)}]

    def _chat(self) -> Request:
        more = self._random.choice(
            [{}, {"logprobs": True, "top_logprobs": 3}, {"frequency_penalty": 1}, {"top_p": 0.9}]
        )
        return "/v1/chat/completions", {"messages": self._messages(), "max_tokens": self._random.randint(8, 64), **more}

    def _completion(self) -> Request:
        more = self._random.choice([{}, {"logprobs": 2, "echo": True}, {"stop": ["\n\n"]}, {"logit_bias": {"42": -5}}])
        prompt = self._random.choice(self._prompts)
        return "/v1/completions", {"prompt": prompt, "max_tokens": self._random.randint(8, 64), **more}

    def _choices(self) -> Request:
        return "/v1/chat/completions", {"messages": self._messages(), "max_tokens": 24, "n": 3}

    def _schema(self) -> Request:
        body = {"messages": self._messages(), "max_tokens": 24, "structured_outputs": {"json": SCHEMA}}
        return "/v1/chat/completions", body

    def _tool(self) -> Request:
        body = {"messages": self._messages(), "max_tokens": 40, "tools": [TOOL], "tool_choice": "required"}
        return "/v1/chat/completions", body

    def _long(self) -> Request:
        """Never the same twice, so that the prefix cache has something to forget."""
        words = " ".join(str(self._random.randrange(1000)) for _ in range(400))
        return "/v1/completions", {"prompt": words, "max_tokens": 8}

    def _wrong(self) -> Request:
        return "/v1/completions", {"prompt": "x", "max_tokens": 10**6}


class Clients:
    """So many at a time, one request after another, until `stop`."""

    def __init__(self, url: str, prompts: Sequence[str], number: int) -> None:
        self.counts: Counter[str] = Counter()  # by kind and status
        self.faults: list[str] = []
        self._url, self._prompts, self._number = url, prompts, number
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(seed,), daemon=True) for seed in range(number)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Wait for the answers that are still to come."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, seed: int) -> None:
        mix = Mix(self._prompts, seed)
        with httpx.Client(base_url=self._url, timeout=WAIT_S) as client:
            while not self._stop.is_set():
                kind, request, leaves = mix.draw()
                try:
                    outcome = _ask(client, request, leaves)
                except httpx.HTTPError as error:
                    outcome = f"{type(error).__name__}: {error}"
                right = outcome in ("200", "left") if kind != "wrong" else outcome == "400"
                with self._lock:
                    self.counts[f"{kind}: {outcome if right else 'fault'}"] += 1
                    if not right:
                        self.faults.append(f"{kind}: {outcome}")


def _ask(client: httpx.Client, request: Request, leaves: int | None) -> str:
    """The status; "left" where the client went away; what is wrong with a stream that does not end as it should."""
    path, body = request
    if not body["stream"]:
        return str(client.post(path, json=body).status_code)
    last = ""
    with client.stream("POST", path, json=body) as answer:
        if answer.status_code != 200:
            return str(answer.status_code)
        for chunks, line in enumerate(line for line in answer.iter_lines() if line):
            if chunks == leaves:
                return "left"
            if line.startswith('data: {"error"'):
                return line
            last = line
    return "200" if last == "data: [DONE]" else f"a stream ended with {last[:80]!r}"
