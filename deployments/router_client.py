"""The engine behind the API: Router replicas behind a Serve handle, and a request that outlives any of them.

Where a router dies its requests go to the one that replaces it, for what they have not delivered yet (delivery.py). An error of
a request itself is raised as it is. Nothing waits for ever: a router takes a request in time or it fails. Knows no HTTP and no
text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from ray.exceptions import ObjectLostError, RayActorError, RayTaskError, WorkerCrashedError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from ddtree.deployments.delivery import Delivery
from ddtree.deployments.errors import NotReady
from ddtree.deployments.lines import Lines, Stream
from ddtree.deployments.metrics import Snapshot
from ddtree.deployments.pods import together
from ddtree.deployments.requests import Delta, GenerationRequest

log = logging.getLogger("ray.serve")
LOST = (RayActorError, WorkerCrashedError, ObjectLostError)  # what the death of a router, or of its node, raises
PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0  # between tries, doubled each time
MAX_LOSSES = 5  # with no token in between: a request that kills routers must not go on
STATUS_S, POD_STATUS_S = 15, 10  # until all pods have answered, until each has


class RouterEngine:
    """What the API calls its engine."""

    def __init__(self, router: DeploymentHandle, resubmit_s: float, target: str = "") -> None:
        """`resubmit_s`: so long a request waits for a router to take it, at first and whenever it has lost its own. `target`:
        the only one whose tokens will do (`TargetConfig.key`)."""
        self._generate = router.options(stream=True).generate
        self._routers, self._lines = router, Lines()
        self._resubmit_s, self._target = resubmit_s, target

    async def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Deltas of a request; closing the iterator cancels it. Raises NotReady where no router takes it in time, and what a
        router raises of the request itself."""
        delivery, losses = Delivery(replace(request, target=self._target)), 0
        while True:
            call, stream = await self._submit(delivery)
            watch, finished = asyncio.create_task(self._watch(call, stream)), False
            try:
                while not finished:
                    delta = await stream.next()
                    finished, losses = delta.finish_reason is not None, 0
                    yield delivery.take(delta)
                return
            except Exception as error:
                losses += 1
                if not _lost(error):
                    raise _cause(error) from None
                if losses == MAX_LOSSES:
                    raise NotReady(f"{losses} routers in turn were lost while they served this request") from None
                log.warning("request %s lost its router after %d tokens", request.request_id, len(delivery.token_ids))
            finally:
                self._lines.forget(stream)
                if not finished:
                    watch.cancel()
                    call.cancel()

    async def _submit(self, delivery: Delivery) -> tuple[Any, Stream]:
        """The call of a router that has taken the rest of a request, and what comes of it."""
        deadline, pause = time.monotonic() + self._resubmit_s, PAUSE_S
        while True:
            rest = delivery.rest()
            stream, taken = self._lines.stream(rest.request_id), False
            call = self._generate.remote(rest, self._lines.name)
            try:
                await asyncio.wait_for(self._taken(call, stream), deadline - time.monotonic())
                taken = True
                return call, stream
            except TimeoutError:
                raise NotReady(f"no router took the request for {self._resubmit_s:g} s: try again later") from None
            except Exception as error:
                if not _lost(error):
                    raise _cause(error) from None
            finally:
                if not taken:
                    self._lines.forget(stream)
                    call.cancel()
            await asyncio.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _taken(self, call: Any, stream: Stream) -> None:
        """Returns when a router says that it has the request."""
        self._lines.read(stream, await anext(call))
        await stream.begun()

    async def _watch(self, call: Any, stream: Stream) -> None:
        """Where the call fails, so does the stream. It may end before the last delta is here."""
        try:
            async for _ in call:
                pass
        except Exception as error:
            stream.put(error)

    async def health(self) -> dict[str, Any]:
        """Figures of all pods; raises when there is none whose round loop moves and that has a verifier."""
        pods = await self._ask("status")
        if not any(pod["verifier_connected"] for pod in pods):
            raise NotReady("the target is loading")
        return together(pods)

    async def metrics(self) -> list[Snapshot]:
        """The numbers of every pod that answers; raises when there is none."""
        return await self._ask("metrics")

    async def _ask(self, method: str) -> list[Any]:
        """What the pods answer that do so in time. Raises NotReady, or what a router raised, where there is none."""
        asked = self._routers.broadcast(method, POD_STATUS_S)
        try:
            answers = await asked.results_async(timeout_s=STATUS_S, return_exceptions=True)
        except TimeoutError:
            raise NotReady(f"no router has answered for {STATUS_S} s") from None
        except DeploymentUnavailableError:
            raise NotReady("the target is loading") from None
        pods = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not pods:
            raise next((_cause(answer) for answer in answers), NotReady("no router has answered"))
        return pods


def _cause(error: Exception) -> Exception:
    """What was raised in the other process."""
    return error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, Exception) else error


def _lost(error: Exception) -> bool:
    """Whether the router is gone, not the request at fault."""
    return isinstance(error, LOST) and not isinstance(error, RayTaskError)
