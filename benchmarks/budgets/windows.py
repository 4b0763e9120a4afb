"""Clients that keep a service busy, and what it gave in a window of time. Knows the HTTP API alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ddtree.deployments.commands.client import chat_body, post_chat, settings
from ddtree.deployments.requests import Budget

MAX_TOKENS = 128
SETTLE = 0.3  # of a window's length, that its mode runs before it begins
COUNTED = ("vllm:generation_tokens", "ddtree:forecast_tokens", "ddtree:forecast_accepted_tokens", "ddtree:rounds")
WORD = "context "  # a token, of most tokenizers


@dataclass(frozen=True)
class Window:
    """What a mode gave."""

    context: int  # tokens before every prompt
    streams: int
    budget: Budget
    seconds: float
    tokens: int
    rounds: int
    forecast_tokens: float  # draft tokens expected to be accepted where the budget adapts
    forecast_accepted: int  # those that were


class Load:
    """Clients at one concurrency and context."""

    def __init__(self, url: str, prompts: Sequence[str], context: int, streams: int, temperature: float) -> None:
        self._url, self._context, self._streams, self._temperature = url, context, streams, temperature
        beginning = WORD * context
        self._prompts = [beginning + prompt for prompt in prompts]

    def run(self, budget: Budget, seconds: float, first: int = 0) -> Window:
        """From the prompt number `first` on: what a text is about decides how well it can be drafted. Raises ServerError where
        a request fails."""
        self._next = count(first)
        return asyncio.run(self._run(budget, seconds))

    async def _run(self, budget: Budget, seconds: float) -> Window:
        async with httpx.AsyncClient(**settings(self._url)) as client:
            clients = [asyncio.create_task(self._ask(client, budget)) for _ in range(self._streams)]
            try:
                await self._watch(clients, SETTLE * seconds)
                before, begin = await self._counts(client), time.perf_counter()
                await self._watch(clients, seconds)
                after, took = await self._counts(client), time.perf_counter() - begin
            finally:
                for one in clients:
                    one.cancel()
                await asyncio.gather(*clients, return_exceptions=True)
            await self._rest(client)
        tokens, forecast, accepted, rounds = (after[name] - before[name] for name in COUNTED)
        return Window(self._context, self._streams, budget, took, int(tokens), int(rounds), forecast, int(accepted))

    async def _ask(self, client: httpx.AsyncClient, budget: Budget) -> None:
        while True:
            number = next(self._next)
            message = {"role": "user", "content": self._prompts[number % len(self._prompts)]}
            body = chat_body(
                [message],
                budget=budget,
                max_tokens=MAX_TOKENS,
                temperature=self._temperature,
                seed=number,
            )
            await post_chat(client, body, f"window-{number}")

    async def _watch(self, clients: list[asyncio.Task[None]], seconds: float) -> None:
        """Wait, unless a client fails: then raise its error."""
        failed, _ = await asyncio.wait(clients, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for one in failed:
            one.result()

    async def _counts(self, client: httpx.AsyncClient) -> dict[str, float]:
        text = (await client.get("/metrics")).text
        families = {family.name: family for family in text_string_to_metric_families(text)}
        return {name: sum(s.value for s in families[name].samples if s.name == f"{name}_total") for name in COUNTED}

    async def _rest(self, client: httpx.AsyncClient) -> None:
        """Until nothing runs any more."""
        while (health := (await client.get("/health")).json()) and (health["running"] or health["waiting"]):
            await asyncio.sleep(0.05)
