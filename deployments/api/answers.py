"""Text events to OpenAI's answers, whole or in chunks. Knows the answer shapes; knows no HTTP and no engine."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddtree.deployments.api.generation import TextEvent, TextRequest
from ddtree.deployments.api.responses import Answer, Choice, Usage, figures
from ddtree.deployments.api.types import ChatRequest, GenerationFields


@dataclass
class _Delivered:
    """What one choice has sent so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    last: TextEvent | None = None


class AnswerWriter:
    """Writes the answer of one request."""

    def __init__(self, request: GenerationFields, model: str, sequences: Sequence[TextRequest]) -> None:
        self._chat = isinstance(request, ChatRequest)
        self._options = request.ddtree
        self._wants_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._sequences = sequences
        self._delivered = [_Delivered() for _ in sequences]
        prefix, kind = ("chatcmpl", "chat.completion") if self._chat else ("cmpl", "text_completion")
        self._object, self._chunk_object = kind, "chat.completion.chunk" if self._chat else kind
        self._head: dict[str, Any] = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    async def whole(self, events: AsyncIterator[TextEvent]) -> str:
        """Return the answer that is sent at once, as JSON."""
        async for event in events:
            self._take(event)
        choices = []
        for index, done in enumerate(self._delivered):
            text = "".join(done.text)
            body = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            reason = done.last.finish_reason if done.last else None
            choices.append(Choice(index=index, logprobs=None, finish_reason=reason, **body))
        return self._json(self._object, choices, finished=range(len(choices)), usage=self._usage())

    async def chunks(self, events: AsyncIterator[TextEvent]) -> AsyncGenerator[str, None]:
        """Yield the chunks of a stream as JSON: at most one per round, and the usage at the end if asked for."""
        if self._chat:
            yield self._chunk(0, {"role": "assistant", "content": ""})
        async for event in events:
            self._take(event)
            if not event.text and event.finish_reason is None:
                continue
            delta = {"content": event.text} if event.text else {}
            yield self._chunk(event.index, delta if self._chat else event.text, event.finish_reason)
        if self._wants_usage:
            yield self._json(self._chunk_object, [], usage=self._usage())

    def _chunk(self, index: int, content: Any, reason: str | None = None) -> str:
        body = {"delta" if self._chat else "text": content}
        choice = Choice(index=index, logprobs=None, finish_reason=reason, **body)
        usage = {"usage": None} if self._wants_usage else {}
        return self._json(self._chunk_object, [choice], finished=[index] if reason else [], **usage)

    def _json(self, kind: str, choices: list[Choice], finished: Sequence[int] = (), **fields: Any) -> str:
        answer = Answer(object=kind, choices=choices, **self._head, **fields)
        if self._options is not None:
            for choice in choices:
                if choice.index in finished:  # several prompts: each choice has its own figures
                    holder = answer if len(self._delivered) == 1 else choice
                    holder.ddtree = self._figures(choice.index)
        return answer.model_dump_json(exclude_unset=True)

    def _take(self, event: TextEvent) -> None:
        done = self._delivered[event.index]
        done.text.append(event.text)
        done.token_ids.extend(event.token_ids)
        done.last = event

    def _usage(self) -> Usage:
        prompt = sum(len(sequence.request.prompt_ids) for sequence in self._sequences)
        stats = [done.last.stats for done in self._delivered if done.last and done.last.stats]
        cached = sum(s.cached_tokens for s in stats)
        return Usage.of(prompt, sum(len(done.token_ids) for done in self._delivered), cached)

    def _figures(self, index: int) -> dict[str, Any]:
        done = self._delivered[index]
        ids = done.token_ids if self._options and self._options.return_token_ids else None
        return figures(done.last.stats if done.last else None, self._sequences[index].request.budget, ids)
