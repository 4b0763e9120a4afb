"""A router, its verifier and its drafter in one process: the service's own rounds without actors. Knows no Ray and no text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ddtree.deployments.assembly import assemble
from ddtree.deployments.config import AppConfig
from ddtree.deployments.grammar import Grammars, tokenizer_of
from ddtree.deployments.loading import load_drafter, load_target
from ddtree.deployments.measuring import measure
from ddtree.deployments.models import Models
from ddtree.deployments.requests import GenerationRequest
from ddtree.deployments.round_loop import Emit
from ddtree.deployments.sequence import Sequence
from ddtree.deployments.sizing import step_rows
from ddtree.drafter.items import Candidates, DraftItem
from ddtree.verifier.batch import VerifyBatch, VerifyResult
from ddtree.verifier.pages import PageAllocator
from ddtree.verifier.target import Target
from ddtree.verifier.transfer import own


class LocalTarget:
    """A VerifierPeer."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def room(self) -> None:
        """Batches are not copied."""

    def announce(self, batch: VerifyBatch) -> None:
        """Without room nothing is."""

    def start(self, batch: VerifyBatch) -> None:
        self._result = self._target.step(batch)

    def result(self) -> tuple[VerifyResult, VerifyResult]:
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # what was drawn is on its way to the host
        return self._result, self._result


class LocalDrafter:
    """A DrafterPeer."""

    id = "drafter"

    def __init__(self, drafter: Any) -> None:
        """`drafter`: a Drafter, or what drafts like one."""
        self._drafter = drafter

    def start(self, items: list[DraftItem], features: VerifyResult | None) -> None:
        found = self._drafter.draft(items, [] if features is None else [features.features])
        self._found = own(found)

    def result(self) -> Candidates:
        return self._found

    def release(self, sequences: list[str]) -> None:
        self._drafter.release(sequences)


class InProcess:
    """`add` requests, then `run` rounds; what comes of them is emitted. One thread at a time."""

    def __init__(
        self, config: AppConfig, models: Models, emit: Emit, drafter: Callable[[Any], LocalDrafter] = LocalDrafter
    ) -> None:
        """Loads what `config` names; its verifier must be one rank. `drafter` makes the peer of what is loaded."""
        target = load_target(config, models)
        self._rows, self._target = step_rows(config)[0], LocalTarget(target)
        self.loop, self._budgets = assemble(config, models, emit)
        self.loop.verifier = self._target
        self.scheduler = self.loop.scheduler
        self.scheduler.take_pool(PageAllocator(target.pool.pages - 1, config.verifier.page_size))  # the last is scratch
        if models.drafter:
            self.drafter = drafter(load_drafter(config, models))
            self.loop.add_drafter(self.drafter)
        info = models.target
        self._grammars = Grammars(lambda: tokenizer_of(info.model_dir, info.vocab_size, info.eos_token_ids))

    def add(self, request: GenerationRequest) -> Sequence:
        """Raises QueueFull, and GrammarError where its grammar makes no sense."""
        sequence = Sequence(request, time.monotonic())
        if request.grammar is not None:
            sequence.grammar = self._grammars.start(request.grammar, sequence.answer)
        self.scheduler.add(sequence)
        return sequence

    def run(self) -> bool:
        """Begin a round and end it. False when there was nothing to do. A fault ends what was running, and is raised."""
        try:
            return self.loop.run()
        except BaseException as error:
            self.loop.fail_running(error if isinstance(error, Exception) else RuntimeError("interrupted"))
            raise

    def time_steps(self, requests: Iterable[GenerationRequest]) -> None:
        """What steps take, once, where any of these has a budget that adapts. (Without it that is learned from rounds.)"""
        if self._budgets and not self._budgets.costs.step.known and any(request.adapts for request in requests):
            self._budgets.costs.step.measured(list(measure(self._target, self.scheduler, self._rows)))
