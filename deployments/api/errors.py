"""OpenAI-form errors: what went wrong, which parameter, which status. Knows no engine and no Ray."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel

from ddtree.deployments.errors import GrammarError, NotReady
from ddtree.deployments.scheduler import QueueFull

HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "5"},  # a queue moves on sooner than a process starts
}
TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None  # which field
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetails


class ApiError(Exception):
    """An answer other than 200. `message` is one sentence for the person who sent the request."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """Return `{"error": {...}}` as OpenAI clients read it."""
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, HEADERS.get(self.status))


class BadRequest(ApiError):
    """400: the request asks for something that is malformed, impossible or not supported."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, message, param=param, code=code)


def from_engine(error: Exception) -> ApiError:
    """Return the answer for an exception of the engine: 400 for its grammar, 429 when it is full, 503 while it is not
    ready, else 500."""
    cause = getattr(error, "cause", None)  # where Ray keeps the exception of the actor
    error = cause if isinstance(cause, Exception) else error
    if isinstance(error, ApiError):
        return error
    if isinstance(error, GrammarError):
        return BadRequest(f"The answer's grammar cannot be followed: {error}")
    if isinstance(error, QueueFull):
        return ApiError(429, f"The server is full: {error}.", code="queue_full")
    if isinstance(error, NotReady):
        return ApiError(503, str(error) or "The service is starting: try again.", code="not_ready")
    reason = str(error).strip().splitlines()
    return ApiError(500, f"The engine failed this request: {reason[-1] if reason else type(error).__name__}")
