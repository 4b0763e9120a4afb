"""Many random requests through a pool that is too small for them: nothing leaks, and every output equals its solo run.

DDTREE_REQUESTS=2000 runs as many; CI runs fewer.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from ddtree.deployments.requests import GenerationRequest

from .tiny import VOCABULARY, Engine, Guesser, LocalVerifier, make_target, plain, request

REQUESTS = int(os.environ.get("DDTREE_REQUESTS", "150"))
PAGES = 60  # of 4 tokens; the eight sequences that may run at once want up to 15 each


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> LocalVerifier:
    folder: Path = tmp_path_factory.mktemp("target")
    return LocalVerifier(make_target(folder), pages=PAGES)


def conversations(rng: random.Random, verifier: LocalVerifier) -> dict[str, tuple[GenerationRequest, list[int]]]:
    """Requests and what each gets alone: chats that share a beginning, answers sent back with a question more, and prompts
    like no other."""
    beginnings = [[rng.randrange(VOCABULARY) for _ in range(24)] for _ in range(4)]
    made: dict[str, tuple[GenerationRequest, list[int]]] = {}
    for i in range(REQUESTS):
        before = rng.choice(beginnings)[: rng.choice([0, 9, 16, 24])]
        if i > 12 and rng.random() < 0.5:  # of one that has probably ended by then
            asked, answer = rng.choice(list(made.values())[-30:-12])
            if len(asked.prompt_ids) < 24:
                before = [*asked.prompt_ids, *answer]
        prompt = before + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 8))]
        budget, temperature = rng.choice([0, 3, 7, 15]), rng.choice([0.0, 0.0, 0.9])
        new = request(f"r{i}", prompt, rng.randint(1, 20), budget, temperature)
        made[new.request_id] = new, plain(verifier, new)
    return made


@pytest.mark.timeout(300 + REQUESTS)
def test_no_page_leaks_and_every_output_is_its_own(verifier: LocalVerifier) -> None:
    rng = random.Random(0)
    asked = conversations(rng, verifier)
    answers = {name: [*r.prompt_ids, *answer] for name, (r, answer) in asked.items()}
    engine = Engine(verifier)
    for i in range(2):
        engine.loop.add_drafter(Guesser(f"d{i}", answers, seed=i))
    unsent, cancelled = [r for r, _ in reversed(asked.values())], set()

    def between(i: int) -> None:
        running = engine.scheduler.running
        while unsent and len(running) + len(engine.scheduler.waiting) < 12 and rng.random() < 0.7:
            engine.add(unsent.pop())
        if running and rng.random() < 0.03:
            victim = rng.choice(running)
            victim.cancelled = True
            cancelled.add(victim.id)
        if i % 40 == 39:
            drafter = next(iter(engine.loop.drafters.values()))
            drafter.dead = True  # found out in this round
            engine.loop.add_drafter(Guesser(f"late{i}", answers, seed=i))
        verifier.fail_next = i % 97 == 96
        held, pages = {page for sequence in running for page in sequence.pages}, engine.scheduler.pages
        assert len(held) + pages.free_pages == pages.pages

    while unsent:
        engine.run(between, limit=100 * REQUESTS)
    verifier.fail_next = False

    engine.check_end({name: tokens for name, (_, tokens) in asked.items()}, cancelled)
    assert engine.scheduler.preemptions > 0, "the pool was never too small"
    assert len(cancelled) < REQUESTS / 2
