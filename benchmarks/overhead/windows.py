"""Streams that decode at a pod, and what happened in a window of time. Knows no transport."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import ray
from transformers import AutoTokenizer

from ddtree.deployments.models import Models
from ddtree.deployments.requests import Cancelled, GenerationRequest, SamplingParams

from ..pod import WAIT_S, Pod

SETTLE_ROUNDS = 8  # after the last prompt, before a window begins


@dataclass(frozen=True)
class Window:
    """What a pod did meanwhile."""

    streams: int
    budget: int
    seconds: float
    rounds: int
    tokens: int
    draft_seconds: float  # computed by the device, as the next
    verify_seconds: float

    @property
    def round_ms(self) -> float:
        return 1e3 * self.seconds / self.rounds

    @property
    def draft_ms(self) -> float:
        return 1e3 * self.draft_seconds / self.rounds

    @property
    def verify_ms(self) -> float:
        return 1e3 * self.verify_seconds / self.rounds

    @property
    def overhead_ms(self) -> float:
        return self.round_ms - self.draft_ms - self.verify_ms


class Prompts:
    """Requests for long answers, one after another."""

    def __init__(self, models: Models, texts: Sequence[str], temperature: float) -> None:
        tokenizer = AutoTokenizer.from_pretrained(models.target.model_dir)
        turns = [[{"role": "user", "content": text}] for text in texts]
        asked = [tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True) for turn in turns]
        self._ids = itertools.cycle([tuple(one["input_ids"]) for one in asked])
        self._context, self._number, self._temperature = models.max_context, itertools.count(), temperature

    def next(self, budget: int) -> GenerationRequest:
        """One that ends with the context and not before."""
        ids = next(self._ids)
        room = self._context - len(ids) - budget - 1
        number = next(self._number)
        sampling = SamplingParams(temperature=self._temperature, seed=number)
        return GenerationRequest(f"stream-{number}", ids, room, (), sampling, budget, every_round=False)


def measure(pod: Pod, prompts: Prompts, streams: int, budget: int, seconds: float) -> Window:
    """Raises RuntimeError where a stream ends before the window does."""
    with _running(pod, [prompts.next(budget) for _ in range(streams)]):
        began = pod.status()["rounds"]
        pod.wait(lambda status: status["running"] == streams and status["rounds"] > began + SETTLE_ROUNDS, WAIT_S)
        before, computed, begin = pod.status(), pod.compute_seconds(), time.perf_counter()
        time.sleep(seconds)
        after, computed_after, took = pod.status(), pod.compute_seconds(), time.perf_counter() - begin
    if after["running"] != streams:
        raise RuntimeError(
            f"{after['running']} of {streams} streams are left at the end of a window: ask for a shorter one"
        )
    rounds, tokens = (after[name] - before[name] for name in ("rounds", "generated_tokens"))
    draft, verify = (computed_after[name] - computed[name] for name in ("draft", "verify"))
    return Window(streams, budget, took, rounds, tokens, draft, verify)


@contextmanager
def _running(pod: Pod, requests: Sequence[GenerationRequest]) -> Generator[None, None, None]:
    """They are cancelled at the end."""
    threads = [threading.Thread(target=_ask, args=(pod, request)) for request in requests]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ray.get([pod.router.cancel.remote(request.request_id) for request in requests], timeout=WAIT_S)
        for thread in threads:
            thread.join(WAIT_S)


def _ask(pod: Pod, request: GenerationRequest) -> None:
    with suppress(Cancelled):
        pod.ask(request)
