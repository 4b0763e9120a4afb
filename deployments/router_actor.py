"""RouterActor: owns request state and the thread that runs rounds. Requests come and go on its event loop.

Everything that changes the scheduler happens on the round thread: calls from outside are put in its inbox and taken between
rounds. Knows Ray; the round itself is in round_loop.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import ray

from ddtree.deployments.requests import Cancelled, Delta, GenerationRequest

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from ddtree.deployments.config import AppConfig
    from ddtree.deployments.models import Models
    from ddtree.deployments.sequence import Sequence

log = logging.getLogger(__name__)
IDLE_S = 0.5  # how often an idle round thread looks up; work wakes it at once
VERIFIER_RETRY_S = 0.5


@ray.remote(num_cpus=0, enable_tensor_transport=True, max_concurrency=1000)
class RouterActor:
    """One per Router replica; paired with one verifier group."""

    def __init__(self, config: AppConfig, models: Models, verifier: Any) -> None:
        """`verifier` is the Serve handle of the Verifier deployment."""
        import torch

        from ddtree.deployments.links import Links
        from ddtree.deployments.round_loop import RoundLoop
        from ddtree.deployments.scheduler import Limits, Scheduler
        from ddtree.verifier.pages import PageAllocator

        torch.set_num_threads(1)  # small tensors; the cores belong to the target
        self._config, self._verifier = config, verifier
        self._links = Links(config, models)
        max_positions = min([models.max_context] + ([models.drafter.max_positions] if models.drafter else []))
        limits = Limits(
            max_sequences=config.scheduler.max_sequences,
            max_waiting=config.scheduler.max_waiting,
            prefill_rows=config.scheduler.prefill_rows,
            max_positions=max_positions,
            horizon=models.horizon,
            rebuild_window=config.drafter.rebuild_window,
            prefix_cache=config.verifier.prefix_cache,
        )
        # The verifier says how many pages there are: until it is connected no round runs.
        self._scheduler = Scheduler(PageAllocator(1, config.verifier.page_size), limits)
        self._loop = RoundLoop(self._scheduler, self._emit, config.verifier.device)
        self._outboxes: dict[str, asyncio.Queue[Delta | Exception]] = {}
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._heartbeat = time.monotonic()
        self._connected = False  # to a verifier whose weights are loaded
        self._joining: set[str] = set()  # drafters that are met, but with no round yet
        self._thread = threading.Thread(target=self._run, name="rounds", daemon=True)
        self._thread.start()

    # -- called by the Router replica ------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Tokens of a request, one delta a round, after an empty one that says that this router has it. Raises what ended
        it early; `cancel` ends it from outside."""
        from ddtree.deployments.sequence import Sequence

        self._event_loop = asyncio.get_running_loop()
        outbox: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        self._outboxes[request.request_id] = outbox
        sequence = Sequence(request, time.monotonic())
        self._inbox.put(lambda: self._admit(sequence))
        try:
            yield Delta(())
            while True:
                delta = await outbox.get()
                if isinstance(delta, Exception):
                    raise delta
                yield delta
                if delta.finish_reason:
                    return
        finally:
            del self._outboxes[request.request_id]
            sequence.cancelled = True  # no effect on one that is finished

    async def cancel(self, request_id: str) -> None:
        """End a request whose client is gone. Unknown ids are finished requests."""
        if outbox := self._outboxes.get(request_id):
            outbox.put_nowait(Cancelled(request_id))

    async def register_drafter(self, drafter_id: str, actor: ActorHandle) -> None:
        """A drafter is healthy. Harmless to repeat."""
        if drafter_id in self._loop.drafters or drafter_id in self._joining:
            return
        self._joining.add(drafter_id)
        try:
            drafter = await asyncio.to_thread(self._links.drafter, drafter_id, actor)
        except BaseException:
            self._joining.remove(drafter_id)
            raise

        def join() -> None:
            self._loop.add_drafter(drafter)
            self._joining.remove(drafter_id)

        self._inbox.put(join)

    async def deregister_drafter(self, drafter_id: str) -> None:
        """A drafter is about to leave. Returns when its sequences are with others, or have none. Harmless to repeat."""
        event_loop, gone = asyncio.get_running_loop(), asyncio.Event()
        self._inbox.put(
            lambda: self._loop.retire_drafter(drafter_id, lambda: event_loop.call_soon_threadsafe(gone.set))
        )
        await gone.wait()

    async def pid(self) -> int:
        return os.getpid()

    async def status(self) -> dict[str, Any]:
        """Figures for health and people. Raises RuntimeError when the round thread is dead or stuck."""
        age = time.monotonic() - self._heartbeat
        if not self._thread.is_alive() or age > self._config.scheduler.stuck_s:
            raise RuntimeError(f"the round loop has not moved for {age:.0f} s")
        pages, synthetic = self._scheduler.pages, self._config.drafter.synthetic
        return {
            "verifier_connected": self._connected,
            "transport": self._links.transport,
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
            "drafters": sorted(self._loop.drafters),
            "synthetic_drafter": synthetic and synthetic.model_dump(exclude_none=True),  # not null: for benchmarks only
            "kv_pages": {
                "total": pages.pages,
                "free": pages.free_pages,
                "kept": pages.kept_pages,
                "page_size": pages.page_size,
            },
            "preemptions": self._scheduler.preemptions,
            **asdict(self._loop.totals),
        }

    # -- the round thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        from ddtree.deployments.round_loop import PeerLost

        self._loop.verifier = self._connect_verifier()
        while True:
            self._heartbeat = time.monotonic()
            try:
                self._take_inbox()
                if not self._loop.run():
                    self._inbox.get(timeout=IDLE_S)()
            except queue.Empty:
                continue
            except PeerLost as error:  # of a drafter never gets here
                log.warning("verifier lost: %s; its sequences are computed again", error)
                self._loop.verifier_lost()
                self._loop.verifier = self._connect_verifier()
            except Exception as error:  # a fault of ours: fail who was in the batch, serve the others
                log.exception("round failed")
                self._loop.fail_running(error)

    def _take_inbox(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()

    def _admit(self, sequence: Sequence) -> None:
        from ddtree.deployments.scheduler import QueueFull

        try:
            self._scheduler.add(sequence)
        except QueueFull as error:
            self._emit(sequence, error)

    def _emit(self, sequence: Sequence, delta: Delta | Exception) -> None:
        outbox = self._outboxes.get(sequence.id)
        if outbox is not None and self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(outbox.put_nowait, delta)

    def _connect_verifier(self) -> Any:
        """Wait for the verifier deployment's group, however long Serve takes to replace it."""
        from ddtree.verifier.pages import PageAllocator

        self._connected = False
        while True:
            self._heartbeat = time.monotonic()
            try:
                ranks = self._verifier.ranks.remote().result(timeout_s=self._config.verifier.timeout_s)
                link = self._links.verifier(ranks)
                pages: int = ray.get(ranks[0].pages.remote(), timeout=self._config.verifier.timeout_s)
                self._scheduler.take_pool(
                    PageAllocator(pages - 1, self._config.verifier.page_size)
                )  # the last is scratch
                self._connected = True
                return link
            except Exception as error:
                log.warning("no verifier yet: %s", error)
                time.sleep(VERIFIER_RETRY_S)
