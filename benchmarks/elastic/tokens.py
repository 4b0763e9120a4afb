"""How many tokens a crowd's clients have got by when. Knows streams; nothing of drafters."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..chaos.streams import Ask, Crowd

EVERY_S = 0.1

Counts = list[tuple[float, int]]  # by this time (seconds, monotonic) so many


@dataclass(frozen=True)
class Counted(Ask):
    """A request whose chunks say how many tokens there are so far."""

    def body(self) -> dict[str, Any]:
        body = super().body()
        body["stream_options"] |= {"continuous_usage_stats": True}
        return body


def mixed(prompts: Sequence[str], max_tokens: int, least: int) -> list[Ask]:
    """A request for each prompt, again from the first one on where `least` is more; half of them greedy, half seeded."""
    return [
        Counted(prompts[i % len(prompts)], max_tokens, 0.8 * (i % 2), seed=i) for i in range(max(len(prompts), least))
    ]


class Meter:
    """Counts as long as its block runs."""

    def __init__(self, crowd: Crowd) -> None:
        """All requests of the crowd are `Counted`."""
        self.counts: Counts = [(time.monotonic(), 0)]
        self._crowd, self._over = crowd, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            tokens = sum(stream.completion_tokens for stream in list(self._crowd.streams))
            self.counts.append((time.monotonic(), tokens))
