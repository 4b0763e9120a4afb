"""How long a device computes, measured where it computes. Knows no operation."""

from __future__ import annotations

import time
from collections import deque

import torch


class DeviceClock:
    """Adds up the time of marked parts of a device's work: `with clock:` around what is enqueued or, on a CPU, done.

    On a GPU it is the time between two points of the current stream, and nothing waits for it: a part counts once it is done
    and another one begins. It counts from the first reading on: a part costs the host 10 µs, which nobody should pay in vain.
    """

    def __init__(self, device: torch.device) -> None:
        self._seconds, self._counts = 0.0, False
        self._on_gpu, self._began = device.type == "cuda", 0.0
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def seconds(self) -> float:
        self._counts = True
        return self._seconds

    def __enter__(self) -> None:
        if not self._counts:
            return
        if not self._on_gpu:
            self._began = time.perf_counter()
            return
        while self._running and self._running[0][1].query():
            begin, end = self._running.popleft()
            self._seconds += begin.elapsed_time(end) / 1e3
            self._free.append((begin, end))
        self._running.append(self._free.pop() if self._free else (_event(), _event()))
        self._running[-1][0].record()

    def __exit__(self, *_: object) -> None:
        if self._on_gpu and self._running:
            self._running[-1][1].record()
        elif self._began:
            self._seconds += time.perf_counter() - self._began


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
