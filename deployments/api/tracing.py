"""Spans of requests for OpenTelemetry, sent with OTLP over HTTP. Knows text events and their figures; knows no engine.

Of a request: one span from its arrival to its end, under the trace that the client's `traceparent` names. Of each of its
sequences one below that, and below it those of queue and prefill, and of the five stages of a round. A stage's span is its
seconds over all rounds, and the five lie one after the other behind the prefill: rounds by the hundred would be too many
spans. Made when a request ends, from the figures that come with its tokens, so no round waits for a span.

Imported only where `api.otlp_endpoint` is set: the exporter is an extra.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from importlib.metadata import version

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ddtree.deployments.api.errors import from_engine
from ddtree.deployments.api.generation import TextEvent, TextRequest
from ddtree.deployments.requests import RequestStats

EXPORT_S = 2  # a batch that does not arrive in this time, repeats included, is lost
Attributes = dict[str, str | int | float]


class Tracing:
    """Makes the spans and sends them from a thread of its own."""

    def __init__(self, endpoint: str, model: str) -> None:
        """`endpoint`: where spans are posted, such as http://localhost:4318/v1/traces."""
        resource = Resource.create({"service.name": "ddtree-serve", "service.version": version("ddtree-serve")})
        self._provider = TracerProvider(resource=resource)  # of our own: the global one may be Ray's
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=EXPORT_S)))
        self._tracer, self._model = self._provider.get_tracer("ddtree.deployments.api"), model

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()

    async def traced(
        self, events: AsyncGenerator[TextEvent, None], sequences: Sequence[TextRequest], headers: Mapping[str, str]
    ) -> AsyncGenerator[TextEvent, None]:
        """Pass the events on and make the request's spans at its end, however it ends.

        Args:
            events: of one request.
            sequences: its sequences.
            headers: of the request, with lower-case names; `traceparent` and `tracestate` are read.
        """
        parent = TraceContextTextMapPropagator().extract(headers)
        begin, done = time.time_ns(), {sequence.index: _Done(sequence) for sequence in sequences}
        error: Exception | None = None
        try:
            async with aclosing(events):
                async for event in events:
                    done[event.index].take(event)
                    yield event
        except Exception as raised:
            error = raised
            raise
        finally:
            self._write(parent, begin, list(done.values()), error)

    def _write(self, parent: Context, begin: int, done: list[_Done], error: Exception | None) -> None:
        attributes: Attributes = {
            "gen_ai.response.model": self._model,
            "gen_ai.request.n": len(done),
            "gen_ai.usage.prompt_tokens": sum(len(one.sequence.request.prompt_ids) for one in done),
            "gen_ai.usage.completion_tokens": sum(one.tokens for one in done),
        }
        span = self._tracer.start_span("llm_request", parent, SpanKind.SERVER, attributes, start_time=begin)
        if error is not None:
            answer = from_engine(error)
            span.set_attribute("http.response.status_code", answer.status)
            span.set_status(StatusCode.ERROR, answer.message)
        for one in done:
            one.write(self._tracer, span, begin)
        span.end()


@dataclass
class _Done:
    """What one sequence has delivered."""

    sequence: TextRequest
    tokens: int = 0
    reason: str = "none"  # it did not come to its end
    first: int | None = None  # ns since the epoch
    end: int = field(default_factory=time.time_ns)
    stats: RequestStats = field(default_factory=RequestStats)

    def take(self, event: TextEvent) -> None:
        self.end = time.time_ns()
        self.first = self.first or self.end
        self.tokens += len(event.token_ids)
        self.stats = event.stats or self.stats
        self.reason = event.finish_reason or self.reason

    def write(self, tracer: Tracer, parent: Span, begin: int) -> None:
        request, stats = self.sequence.request, self.stats
        attributes: Attributes = {
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.temperature": request.sampling.temperature,
            "gen_ai.request.top_p": request.sampling.top_p,
            "gen_ai.response.finish_reason": self.reason,
            "gen_ai.usage.prompt_tokens": len(request.prompt_ids),
            "gen_ai.usage.completion_tokens": self.tokens,
            "gen_ai.latency.time_in_queue": stats.queue_seconds,
            "gen_ai.latency.time_in_model_prefill": stats.prefill_seconds,
            "ddtree.budget": stats.budget,
            "ddtree.rounds": stats.rounds,
            "ddtree.drafted_tokens": stats.drafted_tokens,
            "ddtree.accepted_tokens": stats.accepted_tokens,
            "ddtree.cached_tokens": stats.cached_tokens,
        }
        if request.every_round and self.first is not None:  # else the first token comes with the last
            attributes["gen_ai.latency.time_to_first_token"] = (self.first - begin) / 1e9
        inside = set_span_in_context(parent)
        span = tracer.start_span("sequence", inside, attributes=attributes, start_time=begin)
        at, below = begin, set_span_in_context(span)
        parts = {"queue": stats.queue_seconds, "prefill": stats.prefill_seconds, **stats.stage_seconds}
        for name, seconds in parts.items():
            end = at + round(seconds * 1e9)
            tracer.start_span(name, below, attributes={"ddtree.seconds": seconds}, start_time=at).end(end)
            at = end
        span.end(max(self.end, at))
