"""The OpenAI-compatible HTTP API as an ASGI app over an engine client. Knows no Ray; a Serve ingress mounts the app:

    @serve.deployment
    @serve.ingress()                                   # no app yet: the replica builds it after its own __init__
    class Ingress:
        def __init__(self, ...): self.settings, self.engine, self.tokenizer = ...
        def __serve_build_asgi_app__(self): return create_app(self.settings, self.engine, self.tokenizer)

`x-request-id` is not written here: Ray Serve's proxy takes it from the request or makes it, and returns it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import platform
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from ddtree.deployments.api.answers import AnswerWriter
from ddtree.deployments.api.body import read_json
from ddtree.deployments.api.deadline import within
from ddtree.deployments.api.errors import ApiError, from_engine
from ddtree.deployments.api.generation import EngineClient, TextEvent, TextRequest, generate_all
from ddtree.deployments.api.keys import RequireKey
from ddtree.deployments.api.metrics import render
from ddtree.deployments.api.openapi import ERRORS, WRITES_ANSWERS, WRITES_METRICS, DescribedAPI, reads
from ddtree.deployments.api.playground import add_playground
from ddtree.deployments.api.preparation import ApiSettings, Preparation
from ddtree.deployments.api.request_log import logged
from ddtree.deployments.api.responses import Text, Tokens
from ddtree.deployments.api.sse import ClientGone, EventStream, while_connected
from ddtree.deployments.api.types import (
    ChatRequest,
    CompletionRequest,
    Detokenize,
    GenerationFields,
    TokenizeChat,
    TokenizeText,
    parse,
)

if TYPE_CHECKING:
    from ddtree.deployments.api.tracing import Tracing

__all__ = ["ApiSettings", "create_app"]

log = logging.getLogger("ray.serve")
VERSIONED = ("ddtree-serve", "ray", "torch", "transformers")


def create_app(settings: ApiSettings, engine: EngineClient, tokenizer: Any) -> FastAPI:
    """Return the app.

    Args:
        settings: names and limits of the deployment.
        engine: generates token ids; an exception of `generate` becomes a 500 with its reason, NotReady a 503.
        tokenizer: a Hugging Face tokenizer; its chat template is the model's.
    """
    tracing = _tracing(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        yield
        if tracing:
            await asyncio.to_thread(tracing.close)

    app = DescribedAPI(title="ddtree-serve", version=version("ddtree-serve"), lifespan=lifespan, responses=ERRORS)
    _answer_errors(app)
    if settings.keys:
        app.add_middleware(RequireKey, digests=settings.keys)
    prepare = Preparation(settings, tokenizer)
    started = int(time.time())

    async def serve(request: Request, kind: type[GenerationFields], sequences_of: Callable[..., Any]) -> Response:
        fields = parse(kind, await read_json(request, settings.max_body_bytes))
        prepare.check_model(fields.model)
        sequences: list[TextRequest] = await asyncio.to_thread(sequences_of, fields)  # long prompts take a while
        if name := request.headers.get("x-request-id"):
            sequences = [sequence.named(name) for sequence in sequences]
        writer = AnswerWriter(fields, settings.model, sequences, tokenizer, settings.metrics_horizon)
        events = generate_all(engine, sequences, tokenizer)
        if settings.request_timeout_s is not None:
            events = within(events, settings.request_timeout_s)
        if tracing:
            events = tracing.traced(events, sequences, request.headers)
        if settings.request_log:
            events = logged(events, sequences)
        try:
            if not fields.stream:
                text = await while_connected(request.receive, writer.whole(events))
                return Response(text, media_type="application/json")
            # The first round comes before the headers, so that a request that fails at once has its status.
            first = await while_connected(request.receive, anext(events))
            return EventStream(_sse(writer, first, events, sequences[0].request.request_id))
        except ClientGone:
            raise
        except Exception as error:
            raise _failed(error, sequences[0].request.request_id) from error

    @app.post("/v1/completions", openapi_extra=reads(CompletionRequest), responses=WRITES_ANSWERS)
    async def completions(request: Request) -> Response:
        return await serve(request, CompletionRequest, prepare.completion)

    @app.post("/v1/chat/completions", openapi_extra=reads(ChatRequest), responses=WRITES_ANSWERS)
    async def chat_completions(request: Request) -> Response:
        return await serve(request, ChatRequest, prepare.chat)

    @app.post("/tokenize", openapi_extra=reads(TokenizeText, TokenizeChat))
    async def tokenize(request: Request) -> Tokens:
        body = await read_json(request, settings.max_body_bytes)
        fields: TokenizeChat | TokenizeText
        fields = parse(TokenizeChat, body) if "messages" in body else parse(TokenizeText, body)
        prepare.check_model(fields.model)
        return await asyncio.to_thread(prepare.tokenize, fields)

    @app.post("/detokenize", openapi_extra=reads(Detokenize))
    async def detokenize(request: Request) -> Text:
        fields = parse(Detokenize, await read_json(request, settings.max_body_bytes))
        prepare.check_model(fields.model)
        return await asyncio.to_thread(prepare.detokenize, fields)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card()]}

    @app.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        prepare.check_model(model)
        return model_card()

    @app.get("/health")
    async def health() -> dict[str, Any]:
        try:
            return await engine.health()
        except Exception as error:
            raise ApiError(503, f"The engine is not healthy: {error}", code="unhealthy") from error

    @app.get("/metrics", responses=WRITES_METRICS, response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        try:
            pods = await engine.metrics()
        except Exception as error:
            raise ApiError(503, f"No router says what it counted: {error}", code="unhealthy") from error
        accept = request.headers.get("accept", "")
        most = settings.most_nodes(settings.default_budget)
        text, content_type = render(pods, settings.model, most, accept)
        return Response(text, headers={"content-type": content_type})

    @app.get("/version")
    async def versions() -> dict[str, str]:
        return {"version": version("ddtree-serve"), "python": platform.python_version()} | {
            name: version(name) for name in VERSIONED[1:]
        }

    add_playground(app)

    def model_card() -> dict[str, Any]:
        budgets = {"default_budget": settings.default_budget, "max_budget": settings.max_budget}
        return {
            "id": settings.model,
            "object": "model",
            "created": started,
            "owned_by": "ddtree-serve",
            "max_model_len": settings.context_length,
            "ddtree": budgets,
        }

    return app


def _tracing(settings: ApiSettings) -> Tracing | None:
    if settings.otlp_endpoint is None:
        return None
    from ddtree.deployments.api.tracing import Tracing  # its libraries are an extra

    return Tracing(settings.otlp_endpoint, settings.model)


async def _sse(
    writer: AnswerWriter, first: TextEvent, rest: AsyncGenerator[TextEvent, None], request_id: str
) -> AsyncGenerator[str, None]:
    async def events() -> AsyncGenerator[TextEvent, None]:
        yield first
        async for event in rest:
            yield event

    async with aclosing(rest):
        try:
            async for chunk in writer.chunks(events()):
                yield chunk
        except Exception as error:  # the headers are gone: the reason travels in the stream
            yield json.dumps(_failed(error, request_id).body(), ensure_ascii=False)
        yield "[DONE]"


def _failed(error: Exception, request_id: str) -> ApiError:
    answer = from_engine(error)
    if answer.status == 500:
        log.error("request %s failed: %s", request_id, answer.message, exc_info=error)
    return answer


def _answer_errors(app: FastAPI) -> None:
    """Give every error of the app OpenAI's form."""

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return error.response()

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        response = ApiError(error.status_code, f"{error.detail}.").response()
        response.headers.update(error.headers or {})  # with 405: the methods that there are
        return response

    @app.exception_handler(ClientGone)
    async def client_gone(_: Request, __: ClientGone) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> JSONResponse:
        return ApiError(500, f"The server failed: {type(error).__name__}.").response()
