"""One line of JSON on stdout for every sequence that ends, however it ends. Knows text events; knows no HTTP and no engine."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from ddtree.deployments.api.errors import from_engine
from ddtree.deployments.api.generation import TextEvent, TextRequest
from ddtree.deployments.api.responses import figures

CLIENT_GONE = 499


async def logged(
    events: AsyncGenerator[TextEvent, None], sequences: Sequence[TextRequest]
) -> AsyncGenerator[TextEvent, None]:
    """Pass the events on, and write a line for each sequence at its end: with status 200 where it has a finish reason, else
    with that of the error that ended the events, or 499 where their reader went away."""
    running = {sequence.index: _Line(sequence) for sequence in sequences}
    status = CLIENT_GONE
    try:
        async with aclosing(events):
            async for event in events:
                running[event.index].take(event)
                if event.finish_reason:
                    running.pop(event.index).write(200)
                yield event
    except Exception as error:
        status = from_engine(error).status
        raise
    finally:
        for line in running.values():
            line.write(status)


@dataclass
class _Line:
    sequence: TextRequest
    begin: float = field(default_factory=time.monotonic)
    tokens: int = 0
    last: TextEvent | None = None

    def take(self, event: TextEvent) -> None:
        self.tokens += len(event.token_ids)
        self.last = event

    def write(self, status: int) -> None:
        request, last = self.sequence.request, self.last
        line = {
            "time": round(time.time(), 3),
            "request_id": request.request_id,
            "status": status,
            "finish_reason": last.finish_reason if last else None,
            "prompt_tokens": len(request.prompt_ids),
            "completion_tokens": self.tokens,
            "seconds": time.monotonic() - self.begin,
            **figures(last.stats if last else None, request.asked_budget, None),
        }
        print(json.dumps(line), flush=True)
