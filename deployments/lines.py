"""Lines: what all requests of an ingress get from a router, in one message a round however many they are.

A message for each request cost both processes half a millisecond a round. So Serve's call for a request says where its router is
and lasts as long as the request does; its deltas come over the line that the ingress has to that router. Knows Ray's streams, not
what a request is.
"""

from __future__ import annotations

import asyncio
import pickle
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from ddtree.deployments.device_actors import unpack
from ddtree.deployments.requests import Delta

Item = tuple[str, Delta | Exception]  # of the request with this id; its last is an error or has a finish reason


@dataclass(frozen=True)
class Address:
    """Of a router."""

    key: str
    packed: bytes  # the actor's handle (`device_actors.pack`)


class Line:
    """A router's end, on its event loop."""

    def __init__(self) -> None:
        self.read = asyncio.Event()  # somebody does
        self._requests: dict[str, asyncio.Event] = {}
        self._items: list[Item] = []
        self._there = asyncio.Event()

    @property
    def idle(self) -> bool:
        return not self._requests

    @contextmanager
    def request(self, request_id: str) -> Iterator[asyncio.Event]:
        """Of a request: set once its last item was taken, or nobody will."""
        ended = self._requests[request_id] = asyncio.Event()
        try:
            yield ended
        finally:
            del self._requests[request_id]

    def put(self, request_id: str, item: Delta | Exception) -> None:
        self._items.append((request_id, portable(item) if isinstance(item, Exception) else item))
        self._there.set()

    async def take(self, timeout_s: float) -> list[Item]:
        """What came since; nothing where nothing comes in time."""
        try:
            await asyncio.wait_for(self._there.wait(), timeout_s)
        except TimeoutError:
            return []
        self._there.clear()
        items, self._items = self._items, []
        for request_id, item in items:
            if (isinstance(item, Exception) or item.finish_reason) and request_id in self._requests:
                self._requests[request_id].set()
        return items

    def close(self) -> None:
        """Nobody reads any more: end what it has."""
        for ended in self._requests.values():
            ended.set()


class Stream:
    """What one request gets, on the ingress's event loop."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.router: str | None = None  # the key of its address
        self._items: deque[Delta | Exception] = deque()
        self._there = asyncio.Event()

    def put(self, item: Delta | Exception) -> None:
        self._items.append(item)
        self._there.set()

    async def begun(self) -> None:
        """Returns with the first delta, which is empty. Raises what ended the request early, as the next."""
        await self._take()

    async def next(self) -> Delta:
        """All that is there, as one; rounds that are told come one by one."""
        delta = await self._take()
        while self._items and not isinstance(later := self._items[0], Exception) and not (delta.round and later.round):
            delta = delta.then(later)
            self._items.popleft()
        return delta

    async def _take(self) -> Delta:
        while not self._items:
            self._there.clear()
            await self._there.wait()
        if isinstance(item := self._items.popleft(), Exception):
            raise item
        return item


class Lines:
    """An ingress's end of all its lines, on one event loop."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex  # by which routers know it
        self._streams: dict[str, Stream] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}

    def stream(self, request_id: str) -> Stream:
        """To be there before a router knows of the request. `forget` ends it."""
        self._streams[request_id] = Stream(request_id)
        return self._streams[request_id]

    def forget(self, stream: Stream) -> None:
        del self._streams[stream.request_id]

    def read(self, stream: Stream, address: Address) -> None:
        """Its deltas come from this router. When that is lost, the stream raises what Ray says of it."""
        stream.router = address.key
        if address.key not in self._readers:
            self._readers[address.key] = asyncio.create_task(self._read(address))

    async def _read(self, address: Address) -> None:
        (router,) = unpack(address.packed)
        try:
            while self._of(address):
                async for reference in router.deltas.remote(self.name):  # ends when the router has had none for a while
                    for request_id, item in await reference:
                        if stream := self._streams.get(request_id):
                            stream.put(item)
        except Exception as error:
            for stream in self._of(address):
                stream.put(error)
        finally:
            del self._readers[address.key]

    def _of(self, address: Address) -> list[Stream]:
        return [stream for stream in self._streams.values() if stream.router == address.key]


def portable(error: Exception) -> Any:
    """The error if it survives the way and would not be taken for one of the way itself, else one that says the same."""
    try:
        if not isinstance(error, RayError):
            return pickle.loads(pickle.dumps(error))
    except Exception:
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")
