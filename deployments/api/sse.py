"""Server-sent events, and work that ends when its client goes away. Knows HTTP; knows no API and no engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection: there is nobody to answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, or cancel it and raise ClientGone when the client disconnects first.

    The request's body must have been read, since what `receive` gives next is the disconnect.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Sends strings as the data of events. Whatever ends it, the generator is closed at once: work is cancelled."""

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        self._events = events
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._framed(), media_type="text/event-stream", headers=headers)

    async def _framed(self) -> AsyncGenerator[str, None]:
        async for event in self._events:
            yield f"data: {event}\n\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self.stream_response(send))
        except (ClientGone, OSError):
            pass
        finally:
            await self._events.aclose()
