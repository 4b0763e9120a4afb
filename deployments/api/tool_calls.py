"""The text of an answer to its tool calls, a piece at a time, as the grammar of tools.py writes them. Knows no engine.

However the text is split, contents and arguments concatenate to the same, and nothing is sent that could still be markup.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from ddtree.deployments.api.tools import AFTER_ARGUMENTS, BEFORE_ARGUMENTS, BEFORE_NAME, OPEN


@dataclass
class Part:
    """What a piece of text brought."""

    content: str = ""  # text that is no call
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)  # by index, as OpenAI's chunks have them

    def delta(self) -> dict[str, Any]:
        """As a chunk has it; empty where there is nothing to say."""
        content = {"content": self.content} if self.content else {}
        return content | ({"tool_calls": list(self.calls.values())} if self.calls else {})


class ToolCallReader:
    """Reads one answer, whose pieces are pushed as they come."""

    def __init__(self) -> None:
        self._held = ""  # the longest end that may be the start of what is looked for
        self._read = self._text
        self._name = ""
        self.calls: list[dict[str, Any]] = []  # so far, as OpenAI's messages have them
        self.content = ""  # so far

    def push(self, piece: str, *, last: bool) -> Part:
        """What the piece makes certain. After the last one what was held back comes out: the answer may end in the middle."""
        self._held += piece
        part = Part()
        while self._read(part):
            pass
        if last and self._read == self._arguments:
            self._argue(part, self._held)
        elif last and self._read == self._text:
            self._say(part, self._held)
        return part

    def reason(self, finish_reason: str | None) -> str | None:
        """Why the answer ended, as a client with tools is to know it."""
        complete = bool(self.calls) and self._read == self._text
        return "tool_calls" if complete and finish_reason == "stop" else finish_reason

    def message(self) -> dict[str, Any]:
        """The whole answer, as OpenAI's messages have it."""
        if not self.calls:
            return {"role": "assistant", "content": self.content}
        return {"role": "assistant", "content": self.content or None, "tool_calls": self.calls}

    # Each reads up to what ends its state, and says whether that was there.

    def _text(self, part: Part) -> bool:
        text, found = self._until(OPEN)
        self._say(part, text)
        if found:
            self._name, self._read = "", self._head
        return found

    def _head(self, part: Part) -> bool:
        text, found = self._until(BEFORE_ARGUMENTS)
        self._name += text
        if found:
            name = self._name.removeprefix(BEFORE_NAME)
            begun = {"id": f"call_{uuid.uuid4().hex}", "type": "function"}
            part.calls[len(self.calls)] = {"index": len(self.calls), **begun, "function": _function(name)}
            self.calls.append({**begun, "function": _function(name)})
            self._read = self._arguments
        return found

    def _arguments(self, part: Part) -> bool:
        text, found = self._until(AFTER_ARGUMENTS)
        self._argue(part, text)
        if found:
            self._read = self._text
        return found

    def _say(self, part: Part, text: str) -> None:
        if not self.calls:  # between calls there is but a line break
            part.content += text
            self.content += text

    def _argue(self, part: Part, text: str) -> None:
        if not text:
            return
        index = len(self.calls) - 1
        self.calls[index]["function"]["arguments"] += text
        piece = part.calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
        piece["function"]["arguments"] += text

    def _until(self, marker: str) -> tuple[str, bool]:
        """The text before the marker, and whether the marker was there; without it, the text that cannot be part of it."""
        before, found, after = self._held.partition(marker)
        if not found:
            cut = next(at for at in range(len(before) + 1) if marker.startswith(before[at:]))
            before, after = before[:cut], before[cut:]
        self._held = after
        return before, bool(found)


def _function(name: str) -> dict[str, str]:
    return {"name": name, "arguments": ""}
