"""A request that takes too long is ended. Knows text events and a clock; knows no engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from ddtree.deployments.api.errors import ApiError
from ddtree.deployments.api.generation import TextEvent


async def within(events: AsyncGenerator[TextEvent, None], seconds: float) -> AsyncGenerator[TextEvent, None]:
    """Pass the events on. Where they do not end in time they are closed, which cancels the request.

    Raises:
        ApiError: 408.
    """
    deadline = time.monotonic() + seconds
    async with aclosing(events):
        while True:
            try:
                event = await asyncio.wait_for(anext(events), deadline - time.monotonic())
            except StopAsyncIteration:
                return
            except TimeoutError:
                reason = f"The request did not end within {seconds:g} s, the most that this server gives it."
                raise ApiError(408, reason, code="request_timeout") from None
            yield event
