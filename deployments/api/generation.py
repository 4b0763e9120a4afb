"""One request to text deltas: starts a sequence per prompt, cuts at stop strings, counts what is delivered.

Knows the engine's token deltas and a tokenizer. Knows no HTTP and no answer shapes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from ddtree.deployments.api.text import Decoder, TextStream
from ddtree.deployments.metrics import Snapshot
from ddtree.deployments.requests import Delta, GenerationRequest, RequestStats, TokenLogprobs, VerifiedRound

MAX_NAME = 64  # characters of a client's name for a request that its id keeps


class EngineClient(Protocol):
    """What the HTTP layer calls: a router, or anything that generates."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Delta]:
        """Yield a delta per round. Closing the iterator cancels the request."""
        ...

    async def health(self) -> dict[str, Any]:
        """Return facts about the engine; raise when it cannot serve."""
        ...

    async def metrics(self) -> Sequence[Snapshot]:
        """Return what each router has counted; raise when none is there to ask."""
        ...


@dataclass(frozen=True)
class TextRequest:
    """One sequence to generate. `index` is its place among the choices."""

    index: int
    request: GenerationRequest
    stop: tuple[str, ...] = ()
    echo: str | None = None  # the prompt's text, where the answer begins with it
    prompt_only: bool = False  # deliver none of what is generated, which is a single token
    include_stop: bool = False  # what stops the text is part of it
    skip_special: bool = True  # special tokens are no text

    def named(self, name: str) -> TextRequest:
        """The same, with the client's name for the request at the head of its id: NAME/INDEX/ID. Names may repeat."""
        own = f"{name[:MAX_NAME]}/{self.index}/{self.request.request_id}"
        return replace(self, request=replace(self.request, request_id=own))


@dataclass(frozen=True)
class TextEvent:
    """What one round delivered. The last event of a sequence has a `finish_reason`; its text may be empty."""

    index: int
    text: str
    token_ids: tuple[int, ...]  # delivered: nothing after a stop string; the stop token included
    finish_reason: str | None = None  # "stop" or "length"
    stats: RequestStats | None = None  # the engine's latest
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the tokens, where they are wanted
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # with the first tokens
    round: VerifiedRound | None = None  # where it is wanted


class TextEvents:
    """The deltas of one sequence to events, until one has a finish reason."""

    def __init__(self, sequence: TextRequest, decoder: Decoder) -> None:
        self._sequence = sequence
        self._stats: RequestStats | None = None
        edits = sequence.request.sampling.edits
        self._stream = TextStream(
            decoder,
            sequence.stop,
            edits.min_tokens if edits else 0,
            include_stop=sequence.include_stop,
            skip_special=sequence.skip_special,
        )

    def take(self, delta: Delta) -> TextEvent | None:
        """What there is to say of it. A stop string may end the text before the engine ends the request."""
        sequence, index = self._sequence, self._sequence.index
        ids, spoken, of_prompt = delta.token_ids, delta.token_ids, delta.prompt_logprobs
        self._stats = stats = delta.stats or self._stats
        if sequence.prompt_only:
            if delta.finish_reason is None:
                return None
            return TextEvent(index, "", (), "length", stats, prompt_logprobs=of_prompt)
        stopped = delta.finish_reason == "stop" and ids and ids[-1] in sequence.request.stop_token_ids
        if stopped and not sequence.include_stop:
            spoken = ids[:-1]  # a token like any other in usage, but not text
        out = self._stream.push(spoken)
        if out.stopped:
            n = out.n_tokens
            told = delta.round and delta.round.within(n)
            return TextEvent(index, out.text, ids[:n], "stop", stats, delta.logprobs[:n], of_prompt, told)
        if delta.finish_reason is None:
            return TextEvent(index, out.text, ids, None, stats, delta.logprobs, of_prompt, delta.round)
        rest = self._stream.finish()
        reason = "stop" if rest.stopped else delta.finish_reason
        return TextEvent(index, out.text + rest.text, ids, reason, stats, delta.logprobs, of_prompt, delta.round)


async def generate_text(
    engine: EngineClient, sequence: TextRequest, decoder: Decoder
) -> AsyncGenerator[TextEvent, None]:
    """Yield an event per round that has something to say.

    Raises:
        RuntimeError: the engine's deltas end without a finish reason.
    """
    events = TextEvents(sequence, decoder)
    async with aclosing(cast(AsyncGenerator[Delta, None], engine.generate(sequence.request))) as deltas:
        async for delta in deltas:
            if event := events.take(delta):
                yield event
                if event.finish_reason:
                    return
    raise RuntimeError("The engine ended a request without a finish reason.")


async def generate_all(
    engine: EngineClient, sequences: Sequence[TextRequest], decoder: Decoder
) -> AsyncGenerator[TextEvent, None]:
    """Yield the events of all sequences, which run at the same time, as they come. The first error ends all."""
    if len(sequences) == 1:
        async with aclosing(generate_text(engine, sequences[0], decoder)) as events:
            async for event in events:
                yield event
        return
    queue: asyncio.Queue[TextEvent | BaseException | None] = asyncio.Queue()

    async def pump(sequence: TextRequest) -> None:
        try:
            async with aclosing(generate_text(engine, sequence, decoder)) as events:
                async for event in events:
                    queue.put_nowait(event)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(sequence)) for sequence in sequences]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
