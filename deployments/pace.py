"""Work that may take a share of the time and no more. Knows no work."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Pace:
    """Time that may be spent. It comes with time that passes, and may be overdrawn by the last piece of work."""

    def __init__(self, share: float, most_s: float) -> None:
        """`share` of the time that passes; of what is saved `most_s` seconds are kept, and are there at the beginning."""
        self._share, self._most, self._saved = share, most_s, most_s

    def passed(self, seconds: float) -> None:
        self._saved = min(self._most, self._saved + self._share * seconds)

    @property
    def ready(self) -> bool:
        return self._saved > 0

    def affords(self, seconds: float) -> bool:
        """Takes so much, if there is as much."""
        if self._saved < seconds:
            return False
        self._saved -= seconds
        return True

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Takes what the block takes."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._saved -= time.perf_counter() - begin
