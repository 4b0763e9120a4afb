"""/openapi.json: what FastAPI says of the routes, and the bodies that the handlers read themselves (body.py has why).

Knows the models of requests and answers; knows no engine.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ddtree.deployments.api.errors import ErrorBody
from ddtree.deployments.api.responses import Answer
from ddtree.deployments.api.types import ChatRequest, CompletionRequest, Detokenize, TokenizeChat, TokenizeText

REQUESTS: tuple[type[BaseModel], ...] = (CompletionRequest, ChatRequest, TokenizeText, TokenizeChat, Detokenize)
REF = "#/components/schemas/{model}"
WRITES_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "model": Answer,
        "description": "The answer; with `stream: true` the same in chunks, as server-sent events that end with [DONE].",
        "content": {"text/event-stream": {}},
    }
}
WRITES_METRICS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Prometheus' text format, or OpenMetrics' where `Accept` asks for it.",
        "content": {"text/plain": {}},
    }
}
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request is malformed, impossible or asks for what is not supported."},
    401: {"model": ErrorBody, "description": "No valid API key."},
    404: {"model": ErrorBody, "description": "No such model or path."},
    408: {"model": ErrorBody, "description": "The body did not come in time, or the answer's time is over."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    429: {"model": ErrorBody, "description": "The queue is full; Retry-After says when to come again."},
    500: {"model": ErrorBody, "description": "The engine failed this request."},
    503: {
        "model": ErrorBody,
        "description": "The service is starting or leaving; Retry-After says when to come again.",
    },
}


class DescribedAPI(FastAPI):
    """FastAPI with the requests' models among its schemas."""

    def openapi(self) -> dict[str, Any]:
        if not self.openapi_schema:
            schema = super().openapi()
            _, found = models_json_schema([(kind, "validation") for kind in REQUESTS], ref_template=REF)
            schema["components"]["schemas"] |= found["$defs"]
        return self.openapi_schema or {}


def reads(*kinds: type[BaseModel]) -> dict[str, Any]:
    """Return what a route's `openapi_extra` says of its body: one of `kinds`, as JSON."""
    options = [{"$ref": REF.format(model=kind.__name__)} for kind in kinds]
    schema = options[0] if len(options) == 1 else {"anyOf": options}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
