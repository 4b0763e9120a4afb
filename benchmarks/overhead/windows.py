"""Streams that decode at a pod, and what happened in a window of time. Knows no transport."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from transformers import AutoTokenizer

from ddtree.deployments.models import Models
from ddtree.deployments.requests import Cancelled, GenerationRequest, SamplingParams

from ..pod import WAIT_S, Pod

SETTLE_ROUNDS = 8  # after the last prompt, before a window begins
LOOK_S = 0.001  # how often it is looked whether a round has ended


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
        begin, before, computed = _round_end(pod, streams)
        time.sleep(seconds)
        end, after, computed_after = _round_end(pod, streams)
    rounds, tokens = (after[name] - before[name] for name in ("rounds", "generated_tokens"))
    draft, verify = (computed_after[name] - computed[name] for name in ("draft", "verify"))
    return Window(streams, budget, end - begin, rounds, tokens, draft, verify)


def _round_end(pod: Pod, streams: int) -> tuple[float, dict[str, Any], dict[str, float]]:
    """When the round that is under way ended, with the status and the compute seconds then. A window of whole rounds: where
    one takes half a second, what was computed in parts of them would be all that is seen."""
    under_way = (status := pod.status())["rounds"]
    while status["rounds"] == under_way:
        if status["running"] != streams:
            raise RuntimeError(f"{status['running']} of {streams} streams are left: ask for a shorter window")
        time.sleep(LOOK_S)
        status = pod.status()
    return time.perf_counter(), status, pod.compute_seconds()


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
