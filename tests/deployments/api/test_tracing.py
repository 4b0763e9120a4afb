"""Spans of real requests, as a receiver of OTLP over HTTP reads them from the real exporter."""

from __future__ import annotations

import gzip
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from ddtree.deployments.api.checks import check
from ddtree.deployments.config import ApiConfig
from ddtree.deployments.errors import ConfigError
from ddtree.deployments.requests import STAGES

from .served import MODEL, LocalEngine, serving

TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ASK: dict[str, Any] = {"prompt": "abc", "max_tokens": 8, "temperature": 0}


class Collector(ThreadingHTTPServer):
    """Takes what exporters post."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Span] = []
        self.services: set[str] = set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
        assert isinstance(self.server, Collector) and self.path == "/v1/traces"
        for part in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.services |= {a.value.string_value for a in part.resource.attributes if a.key == "service.name"}
            self.server.spans += [span for scope in part.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    return LocalEngine(tmp_path_factory.mktemp("target"))


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    yield server
    server.shutdown()


def values(span: Span) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value") or "") for a in span.attributes}


def children(spans: list[Span]) -> dict[bytes, list[Span]]:
    found = defaultdict(list)
    for span in spans:
        found[span.parent_span_id].append(span)
    return found


def post(url: str, **fields: Any) -> httpx.Response:
    headers = {"traceparent": f"00-{TRACE}-{CLIENT_SPAN}-01"}
    return httpx.post(f"{url}/v1/completions", json=ASK | fields, headers=headers, timeout=60)


def test_a_request_is_a_span_with_its_stages_below(engine: LocalEngine, collector: Collector) -> None:
    began = time.time_ns()
    with serving(engine, otlp_endpoint=collector.endpoint) as url:
        answer = post(url, n=2, ddtree={"budget": 4}).json()
    assert collector.services == {"ddtree-serve"}
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    below = children(collector.spans)
    (root,) = below[bytes.fromhex(CLIENT_SPAN)]
    assert (root.name, root.kind) == ("llm_request", Span.SPAN_KIND_SERVER)
    asked = values(root)
    assert (asked["gen_ai.response.model"], asked["gen_ai.request.n"]) == (MODEL, 2)
    assert asked["gen_ai.usage.completion_tokens"] == 16
    assert began <= root.start_time_unix_nano < root.end_time_unix_nano <= time.time_ns()
    sequences = below[root.span_id]
    figures = {values(span)["ddtree.rounds"] for span in sequences}
    assert len(sequences) == 2 and figures == {choice["ddtree"]["rounds"] for choice in answer["choices"]}
    for sequence in sequences:
        parts = below[sequence.span_id]
        assert [part.name for part in parts] == ["queue", "prefill", *STAGES]
        seconds = [(part.end_time_unix_nano - part.start_time_unix_nano) / 1e9 for part in parts]
        assert seconds == pytest.approx([values(part)["ddtree.seconds"] for part in parts], abs=1e-6)
        assert [b.start_time_unix_nano for b in parts[1:]] == [a.end_time_unix_nano for a in parts[:-1]]
        assert values(sequence)["gen_ai.response.finish_reason"] == "length"


def test_a_request_without_a_trace_begins_one(engine: LocalEngine, collector: Collector) -> None:
    with serving(engine, otlp_endpoint=collector.endpoint) as url:
        for header in ("", "nonsense"):
            httpx.post(f"{url}/v1/completions", json=ASK, headers={"traceparent": header}, timeout=60)
    roots = children(collector.spans)[b""]
    assert [span.name for span in roots] == ["llm_request"] * 2
    assert len({span.trace_id for span in roots}) == 2


def test_a_request_that_fails_says_why(engine: LocalEngine, collector: Collector) -> None:
    engine.away = RuntimeError("the target's logits for this request are not finite")
    try:
        with serving(engine, otlp_endpoint=collector.endpoint) as url:
            assert post(url).status_code == 500
    finally:
        engine.away = None
    (root,) = children(collector.spans)[bytes.fromhex(CLIENT_SPAN)]
    assert root.status.code == Status.STATUS_CODE_ERROR and "not finite" in root.status.message
    assert values(root)["http.response.status_code"] == 500


def test_a_collector_that_is_away_costs_no_answer(engine: LocalEngine) -> None:
    with serving(engine, otlp_endpoint="http://127.0.0.1:9/v1/traces") as url, ThreadPoolExecutor(4) as pool:
        assert {answer.status_code for answer in pool.map(lambda _: post(url), range(4))} == {200}


def test_a_configuration_without_the_exporter_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ApiConfig(otlp_endpoint="http://localhost:4318/v1/traces")
    check(config)
    monkeypatch.setattr("ddtree.deployments.api.checks.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'ddtree-serve\[otel\]'"):
        check(config)
