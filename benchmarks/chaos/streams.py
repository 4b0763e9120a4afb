"""Clients that stream answers: what each asked, what it got and when. Knows the chat endpoint; no processes and no faults."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle
from typing import Any

import httpx

from ddtree.deployments.commands.client import ServerError, chat_body, stream_chat
from ddtree.deployments.requests import Budget

STILL_S = 180  # a stream that stands still for longer has failed


@dataclass(frozen=True)
class Ask:
    """One request. Two that are equal have equal answers."""

    prompt: str
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    budget: Budget | None = None  # None: the server's default

    def body(self) -> dict[str, Any]:
        return chat_body(
            [{"role": "user", "content": self.prompt}],
            budget=self.budget,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            stream_options={"include_usage": True},
        )


@dataclass
class Stream:
    """What one client got. Written by the client's thread."""

    ask: Ask
    times: list[float]  # seconds, monotonic: when it asked, then of every chunk
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    completion_tokens: int = 0
    accepted_tokens: int = 0
    finish_reason: str | None = None
    error: str | None = None  # why it failed

    @property
    def answer(self) -> tuple[Any, ...]:
        """What may not depend on who served it."""
        return self.text, self.token_ids, self.completion_tokens, self.finish_reason

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def gap(self, begin: float, end: float) -> float:
        """The longest time between two chunks of which a part lies between `begin` and `end`; 0 where there is none."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((b - a for a, b in pairs if a <= end and b >= begin), default=0.0)

    def take(self, chunk: dict[str, Any]) -> None:
        self.times.append(time.monotonic())
        for choice in chunk["choices"]:
            self.text += choice["delta"].get("content", "")
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        if usage := chunk.get("usage"):
            self.completion_tokens = usage["completion_tokens"]
        if figures := chunk.get("ddtree"):
            self.token_ids, self.accepted_tokens = figures["token_ids"], figures["accepted_tokens"]


class Crowd:
    """So many clients, each with one stream after another. A context: who leaves it with an error cuts the streams short."""

    def __init__(self, url: str, asks: Sequence[Ask], clients: int, more: Callable[[], bool] = lambda: False) -> None:
        """All of `asks` are asked in turn, and again from the first one on as long as there is to be `more`."""
        self.streams: list[Stream] = []  # in the order in which they began
        self._url, self._least, self._more = url, len(asks), more
        self._turns: Iterator[tuple[int, Ask]] = zip(count(), cycle(asks), strict=False)
        self._lock, self._cut = threading.Lock(), threading.Event()
        self._threads = [threading.Thread(target=self._ask_on, daemon=True) for _ in range(clients)]

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._cut.set()
            return
        for thread in self._threads:
            thread.join()

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def moving_since(self, moment: float) -> bool:
        """Whether every stream that had begun by then has got something since, or has ended."""
        begun = [stream for stream in list(self.streams) if stream.times[0] < moment]
        return all(stream.ended or stream.times[-1] > moment for stream in begun)

    @property
    def finished(self) -> int:
        return sum(stream.finish_reason is not None for stream in list(self.streams))

    def _ask_on(self) -> None:
        while not self._cut.is_set():
            with self._lock:
                turn, ask = next(self._turns)
                if turn >= self._least and not self._more():
                    return
                stream = Stream(ask, [time.monotonic()])
                self.streams.append(stream)
            follow(self._url, stream, self._cut)


def follow(url: str, stream: Stream, cut: threading.Event) -> None:
    """Send the stream's request and take what comes, to its end or until it is cut."""
    try:
        with httpx.Client(base_url=url, timeout=STILL_S) as client:
            for chunk in stream_chat(client, stream.ask.body()):
                stream.take(chunk)
                if cut.is_set():
                    return
        if stream.finish_reason is None:
            stream.error = "it ended without a reason"
    except ServerError as error:
        stream.error = str(error)
