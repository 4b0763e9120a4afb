"""Text events to OpenAI's answers, whole or in chunks. Knows the answer shapes; knows no HTTP and no engine."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddtree.deployments.api.generation import TextEvent, TextRequest
from ddtree.deployments.api.logprobs import CompletionLogprobs, TokenNames, chat_logprobs, prompt_logprobs, together
from ddtree.deployments.api.responses import Answer, Choice, RequestMetrics, SpeculativeDecoding, Usage, figures
from ddtree.deployments.api.rounds import round_object
from ddtree.deployments.api.tool_calls import ToolCallReader
from ddtree.deployments.api.types import ChatRequest, GenerationFields
from ddtree.deployments.requests import TokenLogprobs


@dataclass(frozen=True)
class _Part:
    """What is sent at once."""

    text: str
    logprobs: dict[str, list[Any]] | None
    finish_reason: str | None
    round: dict[str, Any] | None = None  # `ddtree.round`, where it is wanted


@dataclass
class _Delivered:
    """What one choice has sent so far."""

    text: list[str] = field(default_factory=list)
    calls: ToolCallReader | None = None  # reads the text where there are tools on offer
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, list[Any]]] = field(default_factory=list)  # part by part
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    echoed: bool = False
    rounds: int = 0  # that were told
    last: TextEvent | None = None


class AnswerWriter:
    """Writes the answer of one request."""

    def __init__(
        self,
        request: GenerationFields,
        model: str,
        sequences: Sequence[TextRequest],
        tokenizer: Any,
        metrics_horizon: int | None = None,
    ) -> None:
        """`metrics_horizon`: deepest node of a tree, where an answer is to have vLLM's figures of speculation."""
        self._metrics_horizon = metrics_horizon
        self._chat = isinstance(request, ChatRequest)
        self._options = request.ddtree
        options = request.stream_options
        self._wants_usage = bool(options and options.include_usage)
        self._wants_usage_so_far = bool(options and options.include_usage and options.continuous_usage_stats)
        self._choices = request.choices
        self._sequences = sequences
        reads = isinstance(request, ChatRequest) and bool(request.offered)
        self._delivered = [_Delivered(calls=ToolCallReader() if reads else None) for _ in sequences]
        self._texts = TokenNames(tokenizer)
        self._names = TokenNames(tokenizer, as_ids=True) if request.return_tokens_as_token_ids else self._texts
        self._top, self._prompt_top = sequences[0].request.logprobs, request.prompt_logprobs
        self._completions = [CompletionLogprobs(tokenizer, self._names, self._top or 0) for _ in sequences]
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
            reason = done.last.finish_reason if done.last else None
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if done.calls:
                done.calls.push(text, last=True)
                message, reason = done.calls.message(), done.calls.reason(reason)
            body: dict[str, Any] = {"message": message} if self._chat else {"text": text}
            choices.append(Choice(index=index, logprobs=together(done.logprobs), finish_reason=reason, **body))
        ends = {"usage": self._usage(), **self._metrics(), **self._prompt_logprobs(choices)}
        return self._json(self._object, choices, finished=range(len(choices)), **ends)

    async def chunks(self, events: AsyncIterator[TextEvent]) -> AsyncGenerator[str, None]:
        """Yield the chunks of a stream as JSON: at most one per round, before the first the prompt
        where it is echoed, and the usage at the end if asked for."""
        if self._chat:
            text = {} if self._delivered[0].calls else {"content": ""}  # of calls alone the content is null
            for sequence in self._sequences:
                yield self._chunk(sequence.index, {"role": "assistant"} | text)
        async for event in events:
            for part in self._take(event):
                delta, reason = self._delta(event.index, part)
                if delta or part.logprobs is not None or reason is not None or part.round:
                    content = delta if self._chat else part.text
                    yield self._chunk(event.index, content, reason, part)
        if self._wants_usage:
            yield self._json(self._chunk_object, [], usage=self._usage(), **self._metrics())

    def _delta(self, index: int, part: _Part) -> tuple[dict[str, Any], str | None]:
        """What a chat's chunk says of a part, and why the answer ends, if it does."""
        calls, reason = self._delivered[index].calls, part.finish_reason
        if calls is None:
            return {"content": part.text} if part.text else {}, reason
        return calls.push(part.text, last=reason is not None).delta(), calls.reason(reason)

    def _chunk(self, index: int, content: Any, reason: str | None = None, part: _Part | None = None) -> str:
        body = {"delta" if self._chat else "text": content}
        choice = Choice(index=index, logprobs=part and part.logprobs, finish_reason=reason, **body)
        usage: dict[str, Any] = {"usage": None} if self._wants_usage else {}
        if self._wants_usage_so_far:
            usage = {"usage": self._usage_of([index])}
        return self._json(
            self._chunk_object, [choice], [index] if reason else [], part.round if part else None, **usage
        )

    def _json(
        self,
        kind: str,
        choices: list[Choice],
        finished: Sequence[int] = (),
        told: dict[str, Any] | None = None,
        **fields: Any,
    ) -> str:
        answer = Answer(object=kind, choices=choices, **self._head, **fields)
        if self._options is not None:
            for choice in choices:
                own = self._figures(choice.index) if choice.index in finished else {}
                own |= {"round": told} if told else {}
                if own:  # several prompts: each choice has its own
                    holder = answer if len(self._delivered) == 1 else choice
                    holder.ddtree = own
        return answer.model_dump_json(exclude_unset=True)

    def _take(self, event: TextEvent) -> list[_Part]:
        """What it delivers: before the first tokens, the prompt where it is echoed."""
        done, sequence = self._delivered[event.index], self._sequences[event.index]
        done.prompt_logprobs += event.prompt_logprobs
        parts = []
        if sequence.echo is not None and not done.echoed and (event.token_ids or event.finish_reason):
            done.echoed = True
            parts.append(_Part(sequence.echo, self._echoed(event), None))
        told = round_object(done.rounds, event.round, self._texts) if event.round else None
        done.rounds += event.round is not None
        parts.append(_Part(event.text, self._logprobs(event), event.finish_reason, told))
        for part in parts:
            done.text.append(part.text)
            done.logprobs += [part.logprobs] if part.logprobs else []
        done.token_ids.extend(event.token_ids)
        done.last = event
        return parts

    def _echoed(self, event: TextEvent) -> dict[str, list[Any]] | None:
        """The `logprobs` of a prompt that is echoed."""
        if self._top is None:
            return None
        sequence = self._sequences[event.index]
        ids, text = sequence.request.prompt_ids, sequence.echo or ""
        return self._completions[event.index].prompt(ids, event.prompt_logprobs, text)

    def _logprobs(self, event: TextEvent) -> dict[str, list[Any]] | None:
        """The `logprobs` of an event's tokens."""
        if self._top is None or not event.token_ids:
            return None
        if self._chat:
            return chat_logprobs(self._names, event.token_ids, event.logprobs, self._top)
        return self._completions[event.index].answer(event.token_ids, event.logprobs)

    def _prompt_logprobs(self, choices: list[Choice]) -> dict[str, Any]:
        """Fields of the answer. As in vLLM they are a chat's own, but of each choice of a completion."""
        if self._prompt_top is None:
            return {}
        each = [
            prompt_logprobs(self._texts, sequence.request.prompt_ids, done.prompt_logprobs, self._prompt_top)
            for sequence, done in zip(self._sequences, self._delivered, strict=True)
        ]
        if self._chat:
            return {"prompt_logprobs": each[0]}
        for choice, found in zip(choices, each, strict=True):
            choice.prompt_logprobs = found
        return {}

    def _usage(self) -> Usage:
        return self._usage_of(range(len(self._sequences)))

    def _usage_of(self, indices: Sequence[int]) -> Usage:
        """Usage of these choices so far. A prompt counts once, however many of them it has."""
        first = {i // self._choices: i for i in reversed(indices)}.values()  # of each prompt
        prompt = sum(len(self._sequences[i].request.prompt_ids) for i in first)
        latest = [self._delivered[i].last for i in first]
        cached = sum(event.stats.cached_tokens for event in latest if event and event.stats)
        return Usage.of(prompt, sum(len(self._delivered[i].token_ids) for i in indices), cached)

    def _metrics(self) -> dict[str, Any]:
        """Return vLLM's figures, which it gives for one sequence only, and in a stream with the usage."""
        last = self._delivered[0].last if len(self._delivered) == 1 else None
        if self._metrics_horizon is None or last is None or last.stats is None or not last.stats.budget:
            return {}
        found = SpeculativeDecoding.of(last.stats, self._metrics_horizon)
        return {"metrics": RequestMetrics(speculative_decoding=found)}

    def _figures(self, index: int) -> dict[str, Any]:
        done = self._delivered[index]
        ids = done.token_ids if self._options and self._options.return_token_ids else None
        return figures(done.last.stats if done.last else None, self._sequences[index].request.asked_budget, ids)
