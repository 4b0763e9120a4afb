"""Calls between two processes of one node over a Unix socket: a method's name and arguments there, its value back.

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
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

log = logging.getLogger(__name__)
LENGTH = struct.Struct("<Q")  # before every message


class CallFailed(RuntimeError):
    """The other end lives, but its method raised."""


@dataclass(frozen=True)
class Answer:
    """What comes back."""

    value: Any = None
    error: str | None = None


class Server:
    """Answers calls until the process ends; every caller has a thread, on which its calls are made."""

    def __init__(self, path: Path, handle: Callable[..., Any]) -> None:
        """`handle` takes a method's name and its arguments. `path`: of the socket, made here."""
        self._handle = handle
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, name="channel", daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=[connection], name="channel-caller", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while True:
                    _send(connection, self._answer(*_receive(connection)))
            except OSError:
                return  # the caller is gone

    def _answer(self, method: str, args: tuple[Any, ...]) -> Answer:
        try:
            return Answer(self._handle(method, *args))
        except ConnectionError:  # this process is ending: the caller is to see that, not a failed call
            raise
        except Exception as error:
            log.exception("call of %s failed", method)
            return Answer(error=f"{type(error).__name__}: {error}")


class Caller:
    """One end of a connection. `start` and `result` come in turn. After any error but CallFailed it is closed for good."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        """Raises OSError where nobody listens. `timeout_s` is for a whole call."""
        self._timeout, self._deadline = timeout_s, 0.0
        self._socket = socket.socket(socket.AF_UNIX)
        self._guard(lambda: self._socket.connect(str(path)), time.monotonic() + timeout_s)

    def start(self, method: str, *args: Any) -> None:
        """Send a call. Raises OSError (TimeoutError among them) where the other end is gone or takes nothing."""
        self._deadline = time.monotonic() + self._timeout
        self._guard(lambda: _send(self._socket, (method, args)), self._deadline)

    def result(self) -> Any:
        """Its value. Raises CallFailed, and OSError where the other end is gone or answers too late."""
        answer: Answer = self._guard(lambda: _receive(self._socket, self._deadline), self._deadline)
        if answer.error is not None:
            raise CallFailed(answer.error)
        return answer.value

    def fileno(self) -> int:
        """For `selectors`: readable when an answer comes, or never will."""
        return self._socket.fileno()

    @property
    def left(self) -> float:
        """Seconds that the call may still take. Raises TimeoutError when they are over."""
        return _left(self._deadline)

    def close(self) -> None:
        self._socket.close()

    def _guard(self, run: Callable[[], Any], deadline: float) -> Any:
        try:
            self._socket.settimeout(_left(deadline))
            return run()
        except OSError:
            self._socket.close()
            raise


def results(callers: Sequence[Caller]) -> list[Any]:
    """The values of calls that were started, in their order. Raises what the first of them to fail raises, without waiting for
    the others, which are closed."""
    values: dict[Caller, Any] = {}
    waiting = set(callers)
    with selectors.DefaultSelector() as selector:
        for caller in callers:
            selector.register(caller, selectors.EVENT_READ)
        try:
            while waiting:
                for key, _ in selector.select(min(caller.left for caller in waiting)):
                    caller = cast(Caller, key.fileobj)
                    selector.unregister(caller)
                    waiting.discard(caller)
                    values[caller] = caller.result()
        finally:
            for caller in waiting:
                caller.close()
    return [values[caller] for caller in callers]


def _send(connection: socket.socket, message: Any) -> None:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    connection.sendall(LENGTH.pack(len(data)) + data)


def _receive(connection: socket.socket, deadline: float | None = None) -> Any:
    (length,) = LENGTH.unpack(_read(connection, LENGTH.size, deadline))
    return pickle.loads(_read(connection, length, deadline))


def _read(connection: socket.socket, size: int, deadline: float | None) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if deadline is not None:
            connection.settimeout(_left(deadline))
        got = connection.recv_into(view)
        if not got:
            raise ConnectionResetError("the other process is gone")
        view = view[got:]
    return data


def _left(deadline: float) -> float:
    """Seconds until then; never 0, which would mean not to wait at all."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left
