"""`ddtree chat`: talk to a running server and see what speculation does. Knows the chat endpoint and the terminal."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console

from ddtree.deployments.commands.bench_view import histogram
from ddtree.deployments.commands.client import ServerError, chat_body, get_json, settings, stream_chat
from ddtree.deployments.requests import Budget

HELP = "Type a message. /new starts over, /quit or Ctrl-D leaves, Ctrl-C stops an answer."


@dataclass(frozen=True)
class ChatOptions:
    """How to ask. None leaves a field to the server."""

    url: str
    budget: Budget | None = None
    temperature: float = 0.0
    max_tokens: int = 512
    seed: int | None = None
    compare: bool = False  # ask plain first, then speculative


@dataclass
class Answer:
    """What came of one streamed request."""

    text: str = ""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)  # the `ddtree` object; empty when stopped

    @property
    def token_ids(self) -> list[int]:
        return list(self.figures.get("token_ids") or ())

    @property
    def tokens_per_s(self) -> float:
        return len(self.token_ids) / self.seconds if self.seconds else 0.0


class Chat:
    """One conversation."""

    def __init__(self, options: ChatOptions, client: httpx.Client, console: Console) -> None:
        self._options, self._client, self._console = options, client, console
        self.messages: list[dict[str, str]] = []

    def say(self, text: str) -> Answer:
        """Send a message, show the answer as it comes and its figures after it, and remember both."""
        self.messages.append({"role": "user", "content": text})
        if self._options.compare:
            plain = self._stream("plain", 0)
            answer = self._stream("speculative", self._options.budget)
            self._compare(plain, answer)
        else:
            answer = self._stream(None, self._options.budget)
        self.messages.append({"role": "assistant", "content": answer.text})
        return answer

    def _stream(self, title: str | None, budget: Budget | None) -> Answer:
        options, answer = self._options, Answer()
        body = chat_body(
            self.messages,
            budget=budget,
            temperature=options.temperature,
            max_tokens=options.max_tokens,
            seed=0 if options.compare and options.seed is None else options.seed,  # both modes draw alike
        )
        if title:
            self._console.print(title, style="bold cyan")
        began = time.perf_counter()
        with closing(stream_chat(self._client, body)) as chunks:
            try:
                for chunk in chunks:
                    piece = chunk["choices"][0]["delta"].get("content", "")
                    answer.text += piece
                    answer.figures = chunk.get("ddtree") or answer.figures
                    self._console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
            except KeyboardInterrupt:
                self._console.print(" (stopped)", style="dim", end="")
        answer.seconds = time.perf_counter() - began
        self._console.print()
        self._show(answer)
        return answer

    def _show(self, answer: Answer) -> None:
        if not answer.figures:
            return
        line = f"{len(answer.token_ids)} tokens, {answer.tokens_per_s:.1f} tokens/s"
        if answer.figures["rounds"]:
            line += f", {answer.figures['acceptance_length']:.2f} tokens a round over {answer.figures['rounds']} rounds"
        self._console.print(line, style="dim", highlight=False)
        if answer.figures["budget"]:
            for bar in histogram(answer.figures["acceptance_histogram"] or []):
                self._console.print(bar, style="dim", highlight=False)

    def _compare(self, plain: Answer, speculative: Answer) -> None:
        if not (plain.tokens_per_s and speculative.tokens_per_s):
            return
        same = plain.token_ids == speculative.token_ids
        words = "the same tokens" if same else "different tokens (a near-tie)"
        ratio = speculative.tokens_per_s / plain.tokens_per_s
        self._console.print(f"speculative is {ratio:.2f} times as fast, {words}", style="green" if same else "yellow")


def run_chat(options: ChatOptions, console: Console) -> None:
    """Talk until the user leaves. Raises ServerError when there is no server."""
    with httpx.Client(**settings(options.url)) as client:
        model = get_json(client, "/v1/models")["data"][0]["id"]
        console.print(f"{model} at {options.url}", style="bold")
        console.print(HELP, style="dim")
        chat = Chat(options, client, console)
        while True:
            try:
                text = console.input("[bold]> [/bold]").strip()
            except (EOFError, KeyboardInterrupt):
                console.print()
                return
            if text == "/quit":
                return
            if text == "/new":
                chat.messages.clear()
            elif text:
                try:
                    chat.say(text)
                except ServerError as error:
                    chat.messages.pop()
                    console.print(str(error), style="red", markup=False)
