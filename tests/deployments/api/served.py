"""The HTTP API over a round loop with a real tiny target, all in this process and without Ray: a server in milliseconds.

Prompts are bytes, a token each. Serve's own part (its proxy, replicas, pods) is in the tests of the running deployment.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from llguidance.hf import from_tokenizer

from ddtree.deployments.api.app import ApiSettings, create_app
from ddtree.deployments.grammar import Grammars
from ddtree.deployments.metrics import Snapshot
from ddtree.deployments.requests import Delta, GenerationRequest
from ddtree.deployments.round_loop import RoundLoop
from ddtree.deployments.scheduler import Limits, QueueFull, Scheduler
from ddtree.deployments.sequence import Sequence
from ddtree.verifier.byte_tokenizer import byte_tokenizer
from ddtree.verifier.pages import PageAllocator

from ...conftest import free_port
from ..tiny import HORIZON, LocalVerifier, make_target

VOCABULARY = 260
EOS = 257
CONTEXT = 256
WINDOW = 6
PAGE = 4
MODEL = "tiny"
ASCII = {"logit_bias": {str(token): -100 for token in range(128, VOCABULARY)}}  # random bytes are hardly ever text


class ByName(dict[str, list[int]]):
    """Tokens by the name that a client gave its request, which heads the ids of its sequences."""

    def __missing__(self, sequence: str) -> list[int]:
        return self.get(sequence.split("/")[0], [])


class LocalEngine:
    """Rounds on a thread of its own, as a RouterActor has it."""

    def __init__(self, folder: Path, max_sequences: int = 8, max_waiting: int = 100) -> None:
        target = make_target(folder, vocab_size=VOCABULARY)
        self.verifier = LocalVerifier(target, pages=1 + 8 * CONTEXT // PAGE, page_size=PAGE)
        limits = Limits(max_sequences, max_waiting, 64, CONTEXT, HORIZON, rebuild_window=WINDOW)
        self.scheduler = Scheduler(PageAllocator(self.verifier.pages - 1, PAGE), limits)
        self.loop = RoundLoop(self.scheduler, self._emit)
        self.loop.verifier = self.verifier
        self.go = threading.Event()  # no round runs while it is not set
        self.go.set()
        self.away: Exception | None = None  # what a router client raises where no router takes a request
        self._grammars = Grammars(
            lambda: from_tokenizer(byte_tokenizer(VOCABULARY), n_vocab=VOCABULARY, eos_token=[EOS])
        )
        self._outboxes: dict[str, Callable[[Delta | Exception], None]] = {}
        self._inbox: queue.SimpleQueue[Sequence] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        if self.away:
            raise self.away
        outbox: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        event_loop = asyncio.get_running_loop()
        self._outboxes[request.request_id] = lambda item: event_loop.call_soon_threadsafe(outbox.put_nowait, item)  # type: ignore[func-returns-value]
        sequence = Sequence(request, time.monotonic())
        if request.grammar is not None:
            sequence.grammar = await asyncio.to_thread(self._grammars.start, request.grammar, sequence.answer)
        self._inbox.put(sequence)
        try:
            while True:
                delta = await outbox.get()
                if isinstance(delta, Exception):
                    raise delta
                yield delta
                if delta.finish_reason:
                    return
        finally:
            del self._outboxes[request.request_id]
            sequence.cancelled = True

    async def health(self) -> dict[str, Any]:
        pages = self.scheduler.pages
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "free": pages.free_pages == pages.pages,
        }

    async def metrics(self) -> list[Snapshot]:
        waiting, running = len(self.scheduler.waiting), len(self.scheduler.running)
        return [Snapshot(0, True, running, waiting, 0.0, 0, HORIZON, 0, self.loop.totals, self.loop.metrics.copy())]

    def _run(self) -> None:
        while True:
            ran = self.go.is_set() and self.loop.run()
            with suppress(queue.Empty):
                while True:
                    self._admit(self._inbox.get(not ran, 0.02))

    def _admit(self, sequence: Sequence) -> None:
        try:
            self.scheduler.add(sequence)
        except QueueFull as error:
            self._emit([(sequence, error)])

    def _emit(self, outgoing: list[tuple[Sequence, Delta | Exception]]) -> None:
        for sequence, delta in outgoing:
            if outbox := self._outboxes.get(sequence.id):
                outbox(delta)


@contextmanager
def serving(engine: LocalEngine, tokenizer: Any = None, **settings: Any) -> Iterator[str]:
    """The base URL of the API over `engine`, with these settings, until the block ends."""
    own = ApiSettings(MODEL, CONTEXT, VOCABULARY, (EOS,), default_budget=0, max_budget=16, **settings)
    port = free_port()
    app = create_app(own, engine, tokenizer or byte_tokenizer(VOCABULARY))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
