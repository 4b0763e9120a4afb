"""The soak's parts: what it asks is what the API takes, and growth is told from bursts."""

from __future__ import annotations

import os
from collections import Counter

from benchmarks.soak.memory import Memory
from benchmarks.soak.mix import Mix
from ddtree.deployments.api.types import ChatRequest, CompletionRequest, parse


def test_every_request_is_one_that_the_api_takes() -> None:
    mix, kinds, leaving = Mix(["Hi.", "Count."], seed=0), Counter[str](), 0
    for _ in range(400):
        kind, (path, body), leaves = mix.draw()
        parse(ChatRequest if "chat" in path else CompletionRequest, body)
        kinds[kind] += 1
        leaving += leaves is not None
        assert body["stream"] or leaves is None
    assert len(kinds) == 7 and min(kinds.values()) > 10 and leaving > 20


def test_growth_is_that_of_the_last_half_without_its_bursts() -> None:
    memory = Memory(os.getpid())
    memory.seconds = [float(i) for i in range(16)]
    memory.mib = {
        "flat": [1.0] * 4 + [50.0] * 12,
        "grows": [10.0 + i for i in range(16)],
        "bursts": [50.0] * 14 + [90.0, 50.0],
    }
    assert memory.growth() == {"flat": 0, "grows": 4, "bursts": 0}
