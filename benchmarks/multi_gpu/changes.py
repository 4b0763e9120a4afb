"""A service under load while its drafters come and go and its processes are killed. Knows no layout."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..chaos.findings import compare, per_kill, speed
from ..chaos.monkey import Kill, Monkey
from ..chaos.streams import Ask, Crowd
from ..elastic.drafters import Drafters
from ..elastic.findings import Phase, per_phase
from ..elastic.tokens import Meter

POLL_S = 0.1


class Changes:
    """`run` once. `found` is JSON values, and has what is known so far."""

    def __init__(
        self,
        url: str,
        document: dict[str, Any],
        log: Path,
        asks: Sequence[Ask],
        streams: int,
        say: Callable[[str], None],
    ) -> None:
        """`document` is served at `url`, by descendants of this process, and `log` the service's output. All of `asks` are
        `Counted`; so many are asked at a time."""
        self._url, self._document, self._log, self._say = url, document, log, say
        self._asks, self._streams = asks, streams
        self.found: dict[str, Any] = {}

    def run(self, drafters: Sequence[int], seconds: float, kills: Sequence[str]) -> None:
        """Each number of drafters for so many seconds, then a kill of each kind, one after the other. Raises NotReached
        where drafters do not come or go, NotRecovered where the service does not."""
        begin = time.monotonic()
        with Crowd(self._url, self._asks, self._streams) as crowd:
            pass
        expected = {stream.ask: stream for stream in crowd.streams}
        self.found["undisturbed"] = speed(crowd.streams, begin)
        begin, over, phases = time.monotonic(), False, list[Phase]()
        crowd = Crowd(self._url, self._asks, self._streams, more=lambda: not over)
        number, meter, struck = Drafters(self._url, self._document, self._log), Meter(crowd), list[Kill]()
        try:
            with meter, crowd:
                for wanted in drafters:
                    phases.append(Phase(wanted, time.monotonic(), number.look()))
                    self._phase(phases[-1], number, seconds)
                monkey = Monkey(self._url, os.getpid(), 0)
                for kind in kills:
                    struck.append(monkey.strike(kind))
                    monkey.recover(crowd.moving_since)
                    self._say(f"{kind} killed, and replaced after {time.monotonic() - struck[-1].at:.1f} s")
                over = True
        finally:
            streams = list(crowd.streams)
            self.found |= {
                "load": speed(streams, begin) | compare(streams, expected),
                "phases": per_phase(phases, number.seen, meter.counts, streams, begin),
                "kills": per_kill(struck, streams, begin),
            }

    def _phase(self, phase: Phase, number: Drafters, seconds: float) -> None:
        self._say(f"{phase.drafters} drafters")
        if not number.reached(phase.drafters, phase.asked):
            number.ask(phase.drafters)
        while not number.reached(phase.drafters, phase.asked):
            time.sleep(POLL_S)
        phase.reached = time.monotonic()
        time.sleep(seconds)
        phase.after, phase.ended = number.look(), time.monotonic()
