"""Whether to draft for one half of the batch while the other half is verified: tried, timed, and the faster way taken.

Halves share nothing that a step needs once, such as reading the weights, so two small steps take longer than a large one. They
pay where draft and verify have processors of their own and a step's time grows with its rows. Knows counts and clocks alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["auto", "on", "off"]

TIMED = 28  # rounds: the last ones that a way is gone for
TRIAL = TIMED + 4  # rounds that a way is tried for; a change takes some to settle
STAY = 64 * TRIAL  # rounds that the faster way is gone for, until the other is tried again
CLEAR = 1.03  # so much faster overlapping must be: it delays each sequence's own tokens


@dataclass
class _Size:
    """What is known of batches of about one size."""

    overlapped: bool = False  # the way of the current phase
    left: int = TRIAL  # rounds of it
    seconds: float = 0.0
    tokens: int = 0
    rates: dict[bool, float] = field(default_factory=dict)  # tokens a second, by way


class Overlap:
    """`now` and `note` in turn."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._sizes: dict[int, _Size] = {}
        self._at: _Size | None = None  # of the round that runs

    def now(self, sequences: int) -> bool:
        """Whether the next round leaves half of so many sequences to the one after it."""
        self._at = None
        if sequences < 2 or self._mode == "off":
            return False
        if self._mode == "on":
            return True
        self._at = self._sizes.setdefault(sequences.bit_length(), _Size())
        return self._at.overlapped

    def note(self, seconds: float, tokens: int) -> None:
        """What the round took and gave. A round that ends none gives none."""
        size = self._at
        if size is None:
            return
        if size.left <= TIMED:
            size.seconds, size.tokens = size.seconds + seconds, size.tokens + tokens
        size.left -= 1
        if size.left:
            return
        size.rates[size.overlapped] = size.tokens / size.seconds
        size.seconds, size.tokens = 0.0, 0
        if len(size.rates) < 2:
            size.overlapped, size.left = not size.overlapped, TRIAL
        else:
            size.overlapped, size.left = size.rates[True] > CLEAR * size.rates[False], STAY
            del size.rates[not size.overlapped]  # to be found anew
