"""A request body from bytes to plain JSON values, with every malformed one answered. Knows no field of the API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import Request

from ddtree.deployments.api.errors import ApiError, BadRequest

BODY_S = 60  # a client sends its whole request within this


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """Return the body of `request`, a JSON object.

    Raises:
        ApiError: 413 above `max_bytes`; 408 where it does not come in time; 400 for anything but one JSON object of valid
            Unicode and finite numbers.
    """
    try:
        raw = await asyncio.wait_for(_read(request, max_bytes), BODY_S)
    except TimeoutError:
        raise ApiError(408, f"The request body did not come within {BODY_S} s.", code="body_too_slow") from None
    try:
        body = json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The request body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise BadRequest(f"The request body must be a JSON object, not {_name(body)}.", code="invalid_json")
    if b"\\u" in raw:  # the only way to write half a surrogate pair in valid UTF-8
        _reject_lone_surrogates(body, "")
    return body


async def _read(request: Request, max_bytes: int) -> bytes:
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > max_bytes:
            raise ApiError(413, f"The request body is larger than {max_bytes} bytes.", code="body_too_large")
    return bytes(raw)


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _reject_lone_surrogates(value: Any, where: str) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadRequest(f"'{where}' holds half of a surrogate pair, which is not text.", where) from None
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _reject_lone_surrogates(item, f"{where}[{i}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            _reject_lone_surrogates(key, where or "body")
            _reject_lone_surrogates(item, f"{where}.{key}" if where else key)


def _name(value: Any) -> str:
    return (
        "null"
        if value is None
        else {"list": "an array", "str": "a string", "bool": "a boolean"}.get(type(value).__name__, "a number")
    )
