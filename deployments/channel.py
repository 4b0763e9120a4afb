"""Calls between two processes of one node over a Unix socket: a method's name and arguments there, its value back. A notice
is a call whose value nobody waits for.

A message takes tens of microseconds where an actor call takes half a millisecond. When a process dies, however it dies, the
kernel closes its sockets, so the other end learns of it at once; a deadline bounds what hangs. Who may enter the folder of the
socket (this user) may call. Knows bytes and pickle, no Ray and no tensors.
"""

from __future__ import annotations

import logging
import pickle
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from ddtree.deployments import polling

log = logging.getLogger(__name__)
LENGTH = struct.Struct("<Q")  # before every message
CHUNK = 1 << 16  # bytes that are read at once; most messages are shorter


class CallFailed(RuntimeError):
    """The other end lives, but its method raised."""


@dataclass(frozen=True)
class Answer:
    """What comes back."""

    value: Any = None
    error: str | None = None


class Watcher(Protocol):
    """A thread that waits for files, see `DeviceThread`."""

    def watch(self, file: socket.socket, ready: Callable[[], None], *, write: bool = False) -> None: ...
    def unwatch(self, file: socket.socket) -> None: ...


class Server:
    """Answers calls until the process ends, all of them on one thread. A caller that is slow or gone keeps no other waiting."""

    def __init__(self, path: Path, handle: Callable[..., Any], watcher: Watcher) -> None:
        """On the watcher's thread. `handle` takes a method's name and its arguments. `path`: of the socket, made here."""
        self._handle, self._watcher = handle, watcher
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        self._listener.listen()
        watcher.watch(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # the caller is gone again
        _Served(connection, self._handle, self._watcher)


class _Served:
    """A caller, at its server's end."""

    def __init__(self, connection: socket.socket, handle: Callable[..., Any], watcher: Watcher) -> None:
        self._connection, self._handle, self._watcher = connection, handle, watcher
        self._messages = _Messages(connection)
        watcher.watch(connection, self._read)

    def _read(self) -> None:
        try:
            while call := self._messages.receive():
                waited_for, method, args = call
                answer = self._answer(method, args)
                if waited_for:
                    self._messages.put(answer)
                    if not self._messages.flush():
                        self._watcher.watch(self._connection, self._write, write=True)
                        break
        except BaseException as error:
            self._close(error)

    def _write(self) -> None:
        """What is left of an answer; its caller sends nothing before it has it all."""
        try:
            if self._messages.flush():
                self._watcher.watch(self._connection, self._read)
        except OSError as error:
            self._close(error)

    def _answer(self, method: str, args: tuple[Any, ...]) -> Answer:
        try:
            return Answer(self._handle(method, *args))
        except ConnectionError:  # this process is ending: the caller is to see that, not a failed call
            raise
        except Exception as error:
            log.exception("call of %s failed", method)
            return Answer(error=f"{type(error).__name__}: {error}")

    def _close(self, error: BaseException) -> None:
        if not isinstance(error, OSError):  # which means that one of both ends is gone
            log.error("a caller's connection is closed", exc_info=error)
        self._watcher.unwatch(self._connection)
        self._connection.close()


class Caller:
    """One end of a connection. `start` and `result` come in turn. After any error but CallFailed it is closed for good."""

    def __init__(self, path: Path, timeout_s: float, awake_s: float | None = None) -> None:
        """Raises OSError where nobody listens. `timeout_s` is for a whole call. `awake_s`: see `polling.select`; None: what
        suits this machine."""
        self._timeout, self._deadline = timeout_s, 0.0
        self.awake_s = polling.awake_s() if awake_s is None else awake_s
        self._socket = socket.socket(socket.AF_UNIX)
        self._selector = selectors.DefaultSelector()
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(str(path))
        except OSError:
            self.close()
            raise
        self._messages = _Messages(self._socket)
        self._selector.register(self._socket, selectors.EVENT_READ)

    def start(self, method: str, *args: Any) -> None:
        """Send a call. Raises OSError (TimeoutError among them) where the other end is gone or takes nothing."""
        self._send(True, method, args)

    def notify(self, method: str, *args: Any) -> None:
        """Send a notice, between calls. Raises as `start` does; what the method raises is logged there."""
        self._send(False, method, args)

    def _send(self, waited_for: bool, method: str, args: tuple[Any, ...]) -> None:
        self._deadline = time.monotonic() + self._timeout
        try:
            self._messages.put((waited_for, method, args))
            while not self._messages.flush():
                self._selector.modify(self._socket, selectors.EVENT_WRITE)
                self._selector.select(self.left)
                self._selector.modify(self._socket, selectors.EVENT_READ)
        except OSError:
            self.close()
            raise

    def result(self) -> Any:
        """Its value. Raises CallFailed, and OSError where the other end is gone or answers too late."""
        try:
            while (answer := self._messages.receive()) is None:
                polling.select(self._selector, self.awake_s, self.left)
        except OSError:
            self.close()
            raise
        if answer.error is not None:
            raise CallFailed(answer.error)
        return answer.value

    def fileno(self) -> int:
        """For `selectors`: readable when an answer comes, or never will."""
        return self._socket.fileno()

    @property
    def left(self) -> float:
        """Seconds that the call may still take. Raises TimeoutError when they are over."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        return left

    def close(self) -> None:
        self._selector.close()
        self._socket.close()


def results(callers: Sequence[Caller]) -> list[Any]:
    """The values of calls that were started, in their order. Raises what the first of them to fail raises, without waiting for
    the others, which are closed."""
    if len(callers) == 1:
        return [callers[0].result()]
    values: dict[Caller, Any] = {}
    waiting = set(callers)
    with selectors.DefaultSelector() as selector:
        for caller in callers:
            selector.register(caller, selectors.EVENT_READ)
        try:
            while waiting:
                left = min(caller.left for caller in waiting)
                for key, _ in polling.select(selector, callers[0].awake_s, left):
                    caller = cast(Caller, key.fileobj)
                    selector.unregister(caller)
                    waiting.discard(caller)
                    values[caller] = caller.result()
        finally:
            for caller in waiting:
                caller.close()
    return [values[caller] for caller in callers]


class _Messages:
    """Messages through a connection, of which no method waits."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setblocking(False)
        self._came = bytearray()
        self._leaving = memoryview(b"")

    def put(self, message: Any) -> None:
        """It leaves with `flush`."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._leaving = memoryview(LENGTH.pack(len(data)) + data)

    def flush(self) -> bool:
        """Send as much as the connection takes. Returns whether that was all. Raises OSError where the other end is gone."""
        try:
            while self._leaving:
                self._leaving = self._leaving[self._connection.send(self._leaving) :]
        except BlockingIOError:
            return False
        return True

    def receive(self) -> Any:
        """A message, None where it is not there as a whole. Raises OSError where the other end is gone."""
        came = self._came
        while len(came) < LENGTH.size or len(came) < (end := LENGTH.size + LENGTH.unpack_from(came)[0]):
            try:
                part = self._connection.recv(CHUNK)
            except BlockingIOError:
                return None
            if not part:
                raise ConnectionResetError("the other process is gone")
            came += part
        with memoryview(came) as whole:
            message = pickle.loads(whole[LENGTH.size : end])
        del came[:end]
        return message
