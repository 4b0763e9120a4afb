"""What a real service takes for given requests, by its own counters. Knows the HTTP API alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ddtree.deployments.commands.client import chat_body, post_chat, settings

from .load import Tokens

Counts = dict[tuple[str, str], float]  # by metric and label

PREFIX = "vllm:spec_decode_num_"
STAGES, BY_DEPTH = "ddtree:stage_seconds", f"{PREFIX}accepted_tokens_per_pos"
TREES, NODES = "ddtree:tree_size_count", "ddtree:tree_size_sum"


@dataclass(frozen=True)
class Point:
    """How it is asked."""

    streams: int  # each asks anew when it is answered, until no request is left
    budget: int  # nodes of every tree


@dataclass(frozen=True)
class Measured:
    """What happened, summed over all requests."""

    streams: int
    budget: int
    requests: list[Tokens]  # in the order in which they were sent
    seconds: float  # from the first to the last answer
    rounds: int
    stages: dict[str, float]  # seconds
    trees: int  # by round and sequence, those of a root alone among them
    drafted: int  # those with more
    nodes: int  # besides roots
    accepted: list[int]  # drafted trees by accepted draft tokens

    @property
    def tokens(self) -> int:
        return sum(answer for _, answer in self.requests)

    @property
    def rows(self) -> int:
        return self.trees + self.nodes + sum(prompt for prompt, _ in self.requests)

    @property
    def entries(self) -> int:
        """Sequences of all steps, where a prompt is one chunk."""
        return self.trees + len(self.requests)

    @property
    def draft_rounds(self) -> float:
        """Rounds but those of prompts alone, which begin every wave of streams."""
        return self.rounds - len(self.requests) / self.streams


def run(url: str, prompts: Sequence[str], max_tokens: int, point: Point) -> Measured:
    """Raises ServerError."""
    return asyncio.run(_run(url, prompts, max_tokens, point))


async def _run(url: str, prompts: Sequence[str], max_tokens: int, point: Point) -> Measured:
    requests: list[Tokens] = [(0, 0)] * len(prompts)
    waiting = iter(range(len(prompts)))

    async def ask(client: httpx.AsyncClient) -> None:
        for number in waiting:
            message = {"role": "user", "content": prompts[number]}
            body = chat_body(
                [message],
                budget=point.budget,
                prefix_cache=False,
                max_tokens=max_tokens,
                temperature=0,
                ignore_eos=True,  # so that all points do the same work
            )
            usage = (await post_chat(client, body, f"point-{number}"))["usage"]
            requests[number] = usage["prompt_tokens"], usage["completion_tokens"]

    async with httpx.AsyncClient(**settings(url)) as client:
        before, began = await _counts(client), time.perf_counter()
        await asyncio.gather(*(ask(client) for _ in range(point.streams)))
        seconds, after = time.perf_counter() - began, await _counts(client)
    found = {key: value - before.get(key, 0.0) for key, value in after.items()}
    reached = [found[PREFIX + "drafts", ""], *(n for (name, _), n in found.items() if name == BY_DEPTH), 0.0]
    return Measured(
        streams=point.streams,
        budget=point.budget,
        requests=requests,
        seconds=seconds,
        rounds=int(found["ddtree:rounds", ""]),
        stages={label: spent for (name, label), spent in found.items() if name == STAGES},
        trees=int(found[TREES, ""]),
        drafted=int(found[PREFIX + "drafts", ""]),
        nodes=int(found[NODES, ""]),
        accepted=[int(more - less) for more, less in pairwise(reached)],
    )


async def _counts(client: httpx.AsyncClient) -> Counts:
    """Of all pods together. Labels are those by which a metric is split, in its own order."""
    found: Counts = {}
    for family in text_string_to_metric_families((await client.get("/metrics")).text):
        for sample in family.samples:
            if "le" not in sample.labels:
                label = sample.labels.get("stage") or sample.labels.get("position") or ""
                key = sample.name.removesuffix("_total"), label
                found[key] = found.get(key, 0.0) + sample.value
    return found
