"""Times GPU work by replaying CUDA graphs. Knows no operation.

A graph holds every input set of a contender several times over, so that a replay takes long against its own launch and the L2
holds little of what comes next. Contenders take turns, every other round in reverse order, and the median counts. What is
measured is the time of the launches in a row, the gaps between them included, as a captured engine has them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

SAMPLES = 50
_LEAST_SAMPLES = 15  # where one replay is long
_REPLAY_US = 1500.0  # shortest replay, so that starting a graph does not count
_TURN_US = 200_000.0  # most time a contender has, unless the least samples take more
_MOST_LAUNCHES = 2048


@dataclass(frozen=True)
class Contender:
    """One way to do an operation."""

    name: str
    calls: Sequence[Callable[[], object]]  # the same work on one input set each
    check: Callable[[], None] | None = None  # raises where the results are wrong
    host: bool = False  # needs the host between launches, so no graph holds it: timed by the wall clock


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call."""

    us: float  # median
    low: float  # 10th percentile
    high: float  # 90th
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        ordered = sorted(samples)
        tenth = len(ordered) // 10
        return cls(statistics.median(ordered), ordered[tenth], ordered[-1 - tenth], len(ordered))


def input_sets(bytes_per_set: float, most: int = 28) -> int:
    """How many sets of inputs of that size are needed so that none is still in the L2 when its turn comes again."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(most, math.ceil(2.2 * l2 / max(bytes_per_set, 1))))


def time_in_turns(captured: Sequence[Captured]) -> dict[str, Timing]:
    """The timing of each contender by name."""
    for turn in range(max((c.samples for c in captured), default=0)):
        for c in captured if turn % 2 == 0 else reversed(captured):
            if turn < c.samples:
                c.replay()
    torch.cuda.synchronize()
    return {c.name: c.timing() for c in captured}


class Captured:
    """A contender as one graph, and the events around its replays."""

    def __init__(self, contender: Contender, most: int = SAMPLES) -> None:
        self.name = contender.name
        for call in contender.calls:  # compiles, plans and allocates what is kept
            call()
        torch.cuda.synchronize()
        sets = len(contender.calls)
        once = _capture(contender, 1)
        estimate = min(_elapsed(once) for _ in range(3))
        loops = min(math.ceil(_REPLAY_US / estimate), max(1, _MOST_LAUNCHES // sets))
        self._graph = once if loops == 1 else _capture(contender, loops)
        self._calls = loops * sets
        self.samples = min(most, max(_LEAST_SAMPLES, int(_TURN_US / (estimate * loops))))
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._graph.replay()

    def replay(self) -> None:
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        self._graph.replay()
        events[1].record()
        self._events.append(events)

    def timing(self) -> Timing:
        """Of the replays since it was last asked; the device must have finished them."""
        events, self._events = self._events, []
        return Timing.of([1e3 * begin.elapsed_time(end) / self._calls for begin, end in events])


def _capture(contender: Contender, loops: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(loops):
            for call in contender.calls:
                call()
    return graph


def _elapsed(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)


def time_by_clock(contender: Contender) -> Timing:
    """From an idle device to an idle device."""
    samples: list[float] = []
    until = time.perf_counter() + _TURN_US / 1e6
    while len(samples) < _LEAST_SAMPLES or (len(samples) < SAMPLES and time.perf_counter() < until):
        call = contender.calls[len(samples) % len(contender.calls)]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        samples.append(1e6 * (time.perf_counter() - begin))
    return Timing.of(samples[1:])  # the first one warms up


@dataclass(frozen=True)
class Rates:
    """What this GPU does in this run, beside which every other figure stands."""

    copy: float  # GB/s, read and written: a kernel, because a graph's own copy node is a third slower
    matmul: float  # TFLOP/s of torch's bfloat16 product of random 8192 × 8192 matrices
    launch: float  # µs of a kernel that does nothing, as these graphs count it

    @classmethod
    def measure(cls) -> Rates:
        n = 8192
        source, one = torch.randn(2**28, device="cuda"), torch.ones(1, device="cuda")
        a, b = (torch.randn(n, n, device="cuda").bfloat16() for _ in range(2))
        target, product = torch.empty_like(source), torch.empty_like(a)
        copy = _best(Contender("copy", [lambda: torch.neg(source, out=target)]))
        matmul = _best(Contender("matmul", [lambda: torch.mm(a, b, out=product)]))
        launch = _best(Contender("launch", [one.neg_]))
        return cls(2 * source.nbytes / copy / 1e3, 2 * n**3 / matmul / 1e6, launch)


def _best(contender: Contender) -> float:
    """µs of the best of a few short bursts with rests between: what the chip can do before it is hot."""
    captured = Captured(contender, most=10)
    bursts = []
    for _ in range(5):
        time.sleep(0.1)
        bursts.append(time_in_turns([captured])[contender.name].us)
    return min(bursts)
