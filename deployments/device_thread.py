"""One thread in which a device actor does all that computes, loading included. Knows no model and no Ray.

Ray runs an actor's constructor on one thread and, where tensor transports are enabled, its methods on another. OpenMP keeps a
pool of threads for each thread that ever computed in parallel; two pools on the same cores make it give up spinning between
the parts of a forward, and a step takes twice as long (docs/experiments.md). On CUDA one thread means one current stream.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DeviceThread:
    """Runs calls one after another on a thread of its own; the caller waits and gets the result or the exception."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="device")

    def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return self._executor.submit(call, *args, **kwargs).result()
