"""One thread in which a device actor does all that computes, loading included. Knows no model and no Ray.

Ray runs an actor's constructor on one thread and, where tensor transports are enabled, its methods on another. OpenMP keeps a
pool of threads for each thread that ever computed in parallel; two pools on the same cores make it give up spinning between
the parts of a forward, and a step takes twice as long (docs/experiments.md). On CUDA one thread means one current stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DeviceThread:
    """Runs calls one after another on a thread of its own; the caller waits and gets the result or the exception, and
    ConnectionAbortedError where the process is ending."""

    def __init__(self) -> None:
        self.busy_seconds = 0.0  # spent in calls so far, loading included
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="device")

    def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        def timed() -> T:
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.busy_seconds += time.perf_counter() - begin

        try:
            future = self._executor.submit(timed)
        except RuntimeError as error:  # no thread takes a call any more
            raise ConnectionAbortedError("the process is ending") from error
        return future.result()
