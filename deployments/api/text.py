"""Token ids to text, a delta at a time, with stop strings. Knows a tokenizer; knows no HTTP, no requests and no engine.

Two rules hold however the ids are split into deltas: the texts concatenate to the decode of all ids, and a stop string
ends the text at the same character and the same token. The second is why the stop string that is *completed* first wins
(and the longest of those that end together): "starts first" would depend on how much text has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    """The part of a Hugging Face tokenizer that this file needs."""

    def decode(self, token_ids: Any, /, *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> Any: ...


@dataclass(frozen=True)
class TextDelta:
    """What one push released."""

    text: str
    n_tokens: int  # how many of the pushed ids belong to the output: all of them unless `stopped`
    stopped: bool = False  # a stop string is complete; nothing may be pushed after it


class Detokenizer:
    """Incremental decode.

    Decodes a window that starts one piece before the new ids, because some decoders treat the first token of a text
    differently (a leading space is dropped), and holds back trailing U+FFFD, which is how a UTF-8 sequence that is
    split between two tokens shows.
    """

    def __init__(self, decoder: Decoder, skip_special: bool = True) -> None:
        self._decoder, self._skip_special = decoder, skip_special
        self._window: list[int] = []  # the ids of the last released piece, then the ids after it
        self._read = 0  # ids of the window whose text is released completely
        self._sent = 0  # characters released after those

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that `ids` make certain."""
        self._window.extend(ids)
        text = self._decode(self._window)
        certain = text.rstrip(REPLACEMENT)
        before = len(self._decode(self._window[: self._read]))
        new = certain[before + self._sent :]
        if len(certain) < len(text):
            self._sent += len(new)
            return new
        if new or self._sent:  # an empty piece (special tokens) cannot stand in front of the next window
            del self._window[: self._read]
        self._read, self._sent = len(self._window), 0
        return new

    def finish(self) -> str:
        """Return what was held back: the U+FFFD of bytes that never became a character."""
        text = self._decode(self._window)
        before = len(self._decode(self._window[: self._read])) + self._sent
        self._read, self._sent = len(self._window), 0
        return text[before:]

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=self._skip_special, clean_up_tokenization_spaces=False)


class StopScanner:
    """Finds the first completed stop string in a text that arrives in pieces."""

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        """`include`: a stop string that ends the text is part of it."""
        if not all(stop):
            raise ValueError("a stop string is empty: leave it out")
        self._stop, self._include = tuple(stop), include
        self._longest = max(map(len, stop), default=0)
        self._held = ""  # the longest suffix that may be the start of a stop string

    def push(self, piece: str, heed: bool = True) -> tuple[str, bool]:
        """Return (text to release, whether a stop string is complete); the text then ends just before it, or with it if it is
        included. Without `heed` one that `piece` completes is text like any other."""
        text, old = self._held + piece, len(self._held)
        found = [(at + len(s), at) for s in self._stop if (at := text.find(s, max(old - len(s) + 1, 0))) >= 0]
        if found and heed:
            self._held = ""
            end, begin = min(found)
            return text[: end if self._include else begin], True
        first = max(len(text) - self._longest + 1, 0)
        cut = next(at for at in range(first, len(text) + 1) if self._may_start(text[at:]))
        self._held = text[cut:]
        return text[:cut], False

    def finish(self) -> str:
        """Return the held-back suffix: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _may_start(self, suffix: str) -> bool:
        return not suffix or any(stop.startswith(suffix) for stop in self._stop)


class TextStream:
    """The text of one sequence: `push` ids as they come, `finish` after the last."""

    def __init__(
        self,
        decoder: Decoder,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        *,
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        """No stop string that is complete before `min_tokens` tokens ends the text."""
        self._detokenizer = Detokenizer(decoder, skip_special)
        self._scanner = StopScanner(stop, include_stop) if stop else None
        self._count, self._min_tokens = 0, min_tokens

    def push(self, ids: Sequence[int]) -> TextDelta:
        """Return the text released by `ids`, cut before a stop string that they complete."""
        if self._scanner is None:
            return TextDelta(self._detokenizer.push(ids), len(ids))
        released = ""
        for n, token in enumerate(ids, start=1):  # one by one: which token completes a stop string matters
            self._count += 1
            text, stopped = self._scanner.push(self._detokenizer.push([token]), self._count > self._min_tokens)
            released += text
            if stopped:
                return TextDelta(released, n, stopped=True)
        return TextDelta(released, len(ids))

    def finish(self) -> TextDelta:
        """Return what was held back. A stop string may still be completed by it."""
        text = self._detokenizer.finish()
        if self._scanner is None:
            return TextDelta(text, 0)
        text, stopped = self._scanner.push(text, self._count > self._min_tokens)
        return TextDelta(text if stopped else text + self._scanner.finish(), 0, stopped)
