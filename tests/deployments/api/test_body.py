"""A body that does not come; those that come malformed are in test_http_errors.py."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import Request

from ddtree.deployments.api import body
from ddtree.deployments.api.errors import ApiError


def test_a_client_that_stops_in_its_request_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_S", 0.05)
    sent = [{"type": "http.request", "body": b'{"prompt": ', "more_body": True}]

    async def receive() -> Any:
        if sent:
            return sent.pop()
        return await asyncio.Event().wait()

    request = Request({"type": "http", "method": "POST", "headers": []}, receive)
    with pytest.raises(ApiError, match="did not come within") as raised:
        asyncio.run(body.read_json(request, 1000))
    assert raised.value.status == 408
