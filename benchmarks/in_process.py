"""Rounds of SmolLM2 with its shipped drafter in this process, on a CPU: all real, scheduler to target, but without Ray."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from transformers import AutoTokenizer

from ddtree.deployments.grammar import Grammars, tokenizer_of
from ddtree.deployments.requests import Delta, GenerationRequest
from ddtree.deployments.round_loop import RoundLoop
from ddtree.deployments.scheduler import Limits, Scheduler
from ddtree.deployments.sequence import Sequence
from ddtree.deployments.shapes import shipped_checkpoints
from ddtree.drafter.drafter import Candidates, Drafter, DraftItem
from ddtree.verifier.batch import VerifyBatch, VerifyResult
from ddtree.verifier.embedded import prepare
from ddtree.verifier.hf import HFTarget
from ddtree.verifier.model_dir import TargetInfo
from ddtree.verifier.pages import PageAllocator
from ddtree.verifier.transfer import own

PAGES, PAGE_SIZE = 2048, 16
SEQUENCES = 8  # at a time


class LocalTarget:
    """A VerifierPeer."""

    def __init__(self, target: HFTarget) -> None:
        self._target = target

    def room(self) -> None:
        """Batches are not copied."""

    def announce(self, batch: VerifyBatch) -> None:
        """Without room nothing is."""

    def start(self, batch: VerifyBatch) -> None:
        self._result = self._target.step(batch)

    def result(self) -> tuple[VerifyResult, VerifyResult]:
        return self._result, self._result


class LocalDrafter:
    """A DrafterPeer."""

    id = "drafter"

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def start(self, items: list[DraftItem], features: VerifyResult | None) -> None:
        found = self._drafter.draft(items, [] if features is None else [features.features])
        self._found = own(found)

    def result(self) -> Candidates:
        return self._found

    def release(self, sequences: list[str]) -> None:
        self._drafter.release(sequences)


D = TypeVar("D", bound=LocalDrafter)


class Rounds(Generic[D]):
    """`loop.run()` plays a round over what was added."""

    def __init__(self, threads: int, drafter: Callable[[Drafter], D], dtype: torch.dtype = torch.bfloat16) -> None:
        directory = prepare("smollm2-135m-instruct")
        model = Drafter(shipped_checkpoints() / "smollm2-135m", directory, top_k=64, threads=threads, dtype=dtype)
        info, layers = model.info, model.info.target_layer_ids
        sizes = {"page_size": PAGE_SIZE, "pages": PAGES, "feature_layers": layers, "threads": threads}
        limits = Limits(SEQUENCES, 10_000, 512, info.max_positions, info.horizon, rebuild_window=128)
        self.drafter = drafter(model)
        self.answers: dict[str, list[int]] = {}
        self.scheduler = Scheduler(PageAllocator(PAGES - 1, PAGE_SIZE), limits)
        self.loop = RoundLoop(self.scheduler, self._emit)
        self.loop.verifier = LocalTarget(HFTarget(directory, dtype=dtype, **sizes))
        self.loop.add_drafter(self.drafter)
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self.stop = (self._tokenizer.eos_token_id,)
        vocab_size = TargetInfo.read(directory).vocab_size
        self._grammars = Grammars(lambda: tokenizer_of(directory, vocab_size, self.stop))

    def chat(self, prompt: str) -> tuple[int, ...]:
        """Token ids of a user's turn."""
        turns = [{"role": "user", "content": prompt}]
        return tuple(
            self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
        )

    def add(self, request: GenerationRequest) -> None:
        sequence = Sequence(request, time.monotonic())
        if request.grammar is not None:
            sequence.grammar = self._grammars.start(request.grammar)
        self.scheduler.add(sequence)

    def _emit(self, outgoing: list[tuple[Sequence, Delta | Exception]]) -> None:
        for sequence, delta in outgoing:
            if isinstance(delta, Exception):
                raise delta
            self.answers.setdefault(sequence.id, []).extend(delta.token_ids)
