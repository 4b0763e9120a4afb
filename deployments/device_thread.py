"""One thread in which a device actor does all that computes, loading included. Knows no model, no Ray and no messages.

Ray runs an actor's constructor on one thread and, where tensor transports are enabled, its methods on another. OpenMP keeps a
pool of threads for each thread that ever computed in parallel; two pools on the same cores make it give up spinning between
the parts of a forward, and a step takes twice as long (docs/experiments.md). On CUDA one thread means one current stream.
What arrives at a socket is taken on this thread, too: handing it over from another would cost the time to wake one.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar, cast

from ddtree.deployments import polling

P = ParamSpec("P")
T = TypeVar("T")


class DeviceThread:
    """Runs calls one after another on a thread of its own: those of other threads, and those that files are watched for.

    When the process ends, a call that has begun is finished, and the files are closed.
    """

    def __init__(self, awake_s: float | None = None, rest: Callable[[], None] = lambda: None) -> None:
        """`awake_s`: see `polling.select`; None: what suits this machine. `rest` is called after every call, which is answered
        then."""
        self.busy_seconds = 0.0  # spent in calls so far, loading included
        self._rest = rest
        self._awake_s = polling.awake_s() if awake_s is None else awake_s
        self._selector = selectors.DefaultSelector()
        self._calls: deque[Callable[[], None]] = deque()
        self._lock, self._ending = threading.Lock(), False  # no call is taken any more
        self._bell, rings = socket.socketpair()
        self._bell.setblocking(False)
        self.watch(rings, partial(self._answer_bell, rings))
        threading.Thread(target=self._work, name="device").start()
        threading.Thread(target=self._end_with_process, name="device-end", daemon=True).start()

    def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """From another thread, which waits and gets the result or the exception, and ConnectionAbortedError where the process
        is ending."""
        answer: Future[T] = Future()
        with self._lock:
            if self._ending:
                raise ConnectionAbortedError("the process is ending")
            self._calls.append(partial(_settle, answer, partial(call, *args, **kwargs)))
        self._ring()
        return answer.result()

    def watch(self, file: socket.socket, ready: Callable[[], None], *, write: bool = False) -> None:
        """On this thread: `ready` is called whenever the file can be read, or be written. It must not raise."""
        event = selectors.EVENT_WRITE if write else selectors.EVENT_READ
        try:
            self._selector.modify(file, event, ready)
        except KeyError:
            self._selector.register(file, event, ready)

    def unwatch(self, file: socket.socket) -> None:
        """On this thread, before the file is closed."""
        self._selector.unregister(file)

    def _work(self) -> None:
        while not self._ending:
            for key, _ in polling.select(self._selector, self._awake_s):
                begin = time.perf_counter()
                key.data()
                self._rest()
                self.busy_seconds += time.perf_counter() - begin
        self._run_calls()  # that were taken before the end was known
        for key in list(self._selector.get_map().values()):
            cast(socket.socket, key.fileobj).close()

    def _answer_bell(self, rings: socket.socket) -> None:
        rings.recv(4096)
        self._run_calls()

    def _run_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def _ring(self) -> None:
        with suppress(OSError):  # it rings already, or nobody is there any more, after the last call
            self._bell.send(b"\0")

    def _end_with_process(self) -> None:
        """The interpreter waits for the device thread once its main thread is done."""
        threading.main_thread().join()
        with self._lock:
            self._ending = True
        self._ring()


def _settle(answer: Future[T], call: Callable[[], T]) -> None:
    try:
        answer.set_result(call())
    except BaseException as error:
        answer.set_exception(error)
        del answer  # or the error would keep itself alive, and all that its frames hold
