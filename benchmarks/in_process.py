"""Rounds of SmolLM2 with its shipped drafter in this process, on a CPU: all real, scheduler to target, but without Ray."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from transformers import AutoTokenizer

from ddtree.deployments import models
from ddtree.deployments.config import AppConfig
from ddtree.deployments.in_process import InProcess, LocalDrafter
from ddtree.deployments.requests import Delta
from ddtree.deployments.sequence import Sequence

SEQUENCES = 8  # at a time

D = TypeVar("D", bound=LocalDrafter)


class Rounds(InProcess, Generic[D]):
    """`loop.run()` plays a round over what was added."""

    drafter: D

    def __init__(self, threads: int, drafter: Callable[[Any], D], dtype: torch.dtype = torch.bfloat16) -> None:
        name = str(dtype).removeprefix("torch.")
        config = AppConfig.parse(
            {
                "target": {"model": "smollm2-135m-instruct", "dtype": name},
                "verifier": {"threads": threads},
                "drafter": {"threads": threads, "dtype": name},
                "tree": {"top_k": 64},
                "scheduler": {"max_sequences": SEQUENCES, "max_waiting": 10_000, "prefill_rows": 512, "overlap": "off"},
            }
        )
        found = models.find(config)
        super().__init__(config, found, self._emit, drafter)
        self.answers: dict[str, list[int]] = {}
        self._tokenizer = AutoTokenizer.from_pretrained(found.target.model_dir)
        self.stop = (self._tokenizer.eos_token_id,)

    def chat(self, prompt: str) -> tuple[int, ...]:
        """Token ids of a user's turn."""
        turns = [{"role": "user", "content": prompt}]
        return tuple(
            self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
        )

    def _emit(self, outgoing: list[tuple[Sequence, Delta | Exception]]) -> None:
        for sequence, delta in outgoing:
            if isinstance(delta, Exception):
                raise delta
            self.answers.setdefault(sequence.id, []).extend(delta.token_ids)
