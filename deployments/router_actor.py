"""RouterActor: owns request state and the thread that runs rounds. Requests come and go on its event loop.

Everything that changes the scheduler happens on the round thread: calls from outside are put in its inbox and taken between
rounds. Knows Ray; the round itself is in round_loop.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayTaskError

from ddtree.deployments.device_actors import unpack
from ddtree.deployments.errors import NotReady
from ddtree.deployments.lines import Item, Line
from ddtree.deployments.metrics import Snapshot
from ddtree.deployments.requests import Cancelled, Delta, GenerationRequest

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from ddtree.deployments.config import AppConfig
    from ddtree.deployments.models import Models
    from ddtree.deployments.sequence import Sequence

log = logging.getLogger(__name__)
IDLE_S = 0.5  # how often an idle round thread looks up; work wakes it at once
VERIFIER_RETRY_S = 0.5
READER_S = 30  # so long a request waits for who is to read its deltas
LINE_IDLE_S = 60
SWITCH_S = 0.0002  # Python's 5 ms are a whole round that waits for the event loop to let go of the interpreter


@ray.remote(num_cpus=0, enable_tensor_transport=True, max_concurrency=1000)
class RouterActor:
    """One per Router replica; paired with one verifier group."""

    def __init__(self, config: AppConfig, models: Models, verifier: Any) -> None:
        """`verifier` is the Serve handle of the Verifier deployment."""
        import torch

        from ddtree.deployments.assembly import assemble
        from ddtree.deployments.grammar import Grammars, tokenizer_of
        from ddtree.deployments.links import Links
        from ddtree.deployments.sizing import step_rows

        sys.setswitchinterval(SWITCH_S)
        torch.set_num_threads(1)  # small tensors; the cores belong to the target
        self._config, self._verifier, self._horizon = config, verifier, models.horizon
        self._links = Links(config, models)
        # The verifier says how many pages there are: until it is connected no round runs.
        self._loop, self._budgets = assemble(config, models, self._emit)
        self._scheduler, self._rows = self._loop.scheduler, step_rows(config)[0]
        target = models.target
        self._grammars = Grammars(lambda: tokenizer_of(target.model_dir, target.vocab_size, target.eos_token_ids))
        self._lines: dict[str, Line] = {}  # by name
        self._line_of: dict[str, Line] = {}  # by request
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._heartbeat = time.monotonic()
        self._ready = threading.Event()  # it had a verifier once
        self._gone: float | None = time.monotonic()  # since when there is no verifier whose weights are loaded
        self._joining: set[str] = set()  # drafters that are met, but with no round yet
        self._thread = threading.Thread(target=self._run, name="rounds", daemon=True)
        self._thread.start()

    # -- called from outside ----------------------------------------------------------------------------------------------

    async def serve(self, request: GenerationRequest, line_name: str) -> None:
        """Run a request to its end, which is when its last delta was taken. A line (lines.py) gets them: an empty one that says
        that this router has the request, one a round, or what ended it early: GrammarError where its grammar makes no sense,
        NotReady where there has been no verifier for too long. `cancel` ends it from outside."""
        from ddtree.deployments.sequence import Sequence

        self._event_loop = asyncio.get_running_loop()
        line, request_id = self._lines.setdefault(line_name, Line()), request.request_id
        sequence = Sequence(request, time.monotonic())
        self._line_of[request_id] = line
        try:
            with line.request(request_id) as ended:
                try:
                    self._refuse_without_verifier()
                    if request.grammar is not None:
                        sequence.grammar = await asyncio.to_thread(
                            self._grammars.start, request.grammar, sequence.answer
                        )
                    line.put(request_id, Delta(()))
                    self._inbox.put(lambda: self._admit(sequence))
                except Exception as error:
                    line.put(request_id, error)
                await asyncio.wait_for(line.read.wait(), READER_S)
                await ended.wait()
        finally:
            sequence.cancelled = True  # no effect on one that is finished
            del self._line_of[request_id]
            if line.idle and not line.read.is_set():
                self._lines.pop(line_name, None)

    async def deltas(self, line_name: str) -> AsyncIterator[list[Item]]:
        """What the requests of a line get, as it comes. Ends when there has been none for a while; requests of a line that is no
        longer read end, too."""
        line = self._lines.setdefault(line_name, Line())
        line.read.set()
        try:
            while (items := await line.take(LINE_IDLE_S)) or not line.idle:
                if items:
                    yield items
        finally:
            line.close()
            if self._lines.get(line_name) is line:
                del self._lines[line_name]

    async def cancel(self, request_id: str) -> None:
        """End a request whose client is gone. Unknown ids are finished requests."""
        if line := self._line_of.get(request_id):
            line.put(request_id, Cancelled(request_id))

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

    async def ready(self) -> None:
        """Returns when it has its first verifier."""
        await asyncio.to_thread(self._ready.wait)

    async def pid(self) -> int:
        return os.getpid()

    async def status(self) -> dict[str, Any]:
        """Figures for health and people. Raises RuntimeError when the round thread is dead or stuck."""
        age = time.monotonic() - self._heartbeat
        if not self._thread.is_alive() or age > self._config.scheduler.stuck_s:
            raise RuntimeError(f"the round loop has not moved for {age:.0f} s")
        pages, synthetic = self._scheduler.pages, self._config.drafter.synthetic
        return {
            "verifier_connected": self._gone is None,
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

    async def metrics(self, pod: int) -> Snapshot:
        """What `/metrics` shows of this pod, whose number is `pod`. The ingress makes text of it, so that no round waits."""
        pages = self._scheduler.pages
        return Snapshot(
            pod=pod,
            verifier_connected=self._gone is None,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            kv_usage=1 - pages.free_pages / pages.pages,
            drafters=len(self._loop.drafters),
            horizon=self._horizon,
            preemptions=self._scheduler.preemptions,
            totals=self._loop.totals,
            metrics=self._loop.metrics.copy(),
        )

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
                log.exception("round failed, and with it %s", [sequence.id for sequence in self._scheduler.running])
                self._loop.fail_running(error)

    def _take_inbox(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()

    def _admit(self, sequence: Sequence) -> None:
        from ddtree.deployments.scheduler import QueueFull

        try:
            self._scheduler.add(sequence)
        except QueueFull as error:
            self._emit([(sequence, error)])

    def _emit(self, outgoing: list[tuple[Sequence, Delta | Exception]]) -> None:
        if self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(self._hand_out, outgoing)

    def _hand_out(self, outgoing: list[tuple[Sequence, Delta | Exception]]) -> None:
        """On the event loop."""
        for sequence, delta in outgoing:
            if line := self._line_of.get(sequence.id):
                line.put(sequence.id, delta)

    def _connect_verifier(self) -> Any:
        """Wait for a group of the verifier deployment that no other router has, however long Serve takes to make one. Requests
        wait less long."""
        self._gone = time.monotonic()
        while True:
            try:
                link = self._claim(self._groups())
                self._gone = None
                self._ready.set()
                return link
            except Exception as error:
                log.warning("no verifier yet: %s", error)
                time.sleep(VERIFIER_RETRY_S)

    def _time_steps(self, verifier: Any, rank: ActorHandle) -> None:
        """What steps take, for budgets that adapt: as the first router found that this group had. Raises PeerLost."""
        from ddtree.deployments.measuring import measure
        from ddtree.deployments.round_loop import PeerLost

        if self._budgets is None or self._budgets.costs.step.known:
            return
        try:
            steps = ray.get(rank.timed.remote(), timeout=self._config.verifier.timeout_s)
            if steps is None:
                steps = list(measure(verifier, self._scheduler, self._rows))
                rank.keep_timed.remote(steps)
            self._budgets.costs.step.measured(steps)
        except PeerLost:
            raise
        except Exception:
            log.exception("steps cannot be timed: what they cost will be learned from rounds")

    def _groups(self) -> list[list[ActorHandle]]:
        """The ranks of each group that may be had now. Waits for one, and raises TimeoutError or what kept all groups from
        answering."""
        asked = self._verifier.broadcast("ranks", self._config, ray.get_runtime_context().current_actor)
        deadline = time.monotonic() + self._config.verifier.timeout_s
        while True:
            self._go_on_without_verifier()
            answers = asked.results(timeout_s=VERIFIER_RETRY_S, return_exceptions=True)
            if groups := [unpack(answer) for answer in answers if isinstance(answer, bytes)]:
                return groups
            late = [
                error for error in answers if isinstance(error, TimeoutError) and not isinstance(error, RayTaskError)
            ]
            if not late or time.monotonic() > deadline:
                raise next((error for error in answers if error is not None), RuntimeError("no group is free"))

    def _claim(self, groups: list[list[ActorHandle]]) -> Any:
        """A link to one of these groups, on this node if possible, which is this router's alone from now on. Raises where there
        is none."""
        from ddtree.verifier.pages import PageAllocator

        timeout_s, me = self._config.verifier.timeout_s, ray.get_runtime_context().current_actor
        for ranks in sorted(groups, key=lambda ranks: not self._links.near(ranks[0], timeout_s)):
            try:
                if ray.get(ranks[0].claim.remote(me), timeout=timeout_s):
                    link = self._links.verifier(ranks)
                    pages: int = ray.get(ranks[0].pages.remote(), timeout=timeout_s)
                    pool = PageAllocator(pages - 1, self._config.verifier.page_size)  # the last is scratch
                    self._scheduler.take_pool(pool)
                    self._time_steps(link, ranks[0])
                    return link
            except Exception:
                ranks[0].release.remote(me)
                raise
        raise RuntimeError("another router was faster")

    def _go_on_without_verifier(self) -> None:
        """What the round thread does for requests and drafters meanwhile."""
        self._heartbeat = time.monotonic()
        self._take_inbox()
        self._loop.drop_cancelled()
        try:
            self._refuse_without_verifier()
        except NotReady as error:
            self._loop.fail_all(error)

    def _refuse_without_verifier(self) -> None:
        """Raise NotReady where there has been no verifier for longer than requests wait for one."""
        gone, most = self._gone, self._config.api.verifier_wait_s
        if gone is not None and time.monotonic() - gone > most:
            raise NotReady(f"there has been no verifier for {most:g} s: try again later")
