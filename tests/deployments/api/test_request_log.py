"""One line of JSON a sequence, whatever ends it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from ddtree.deployments.api.generation import TextEvent, TextRequest
from ddtree.deployments.api.request_log import logged
from ddtree.deployments.errors import NotReady
from ddtree.deployments.requests import GenerationRequest, RequestStats

SEQUENCES = [TextRequest(i, GenerationRequest(f"client/{i}/f00", (1, 2, 3), 8, budget=4)) for i in range(2)]
STATS = RequestStats(budget=4, rounds=2, drafted_tokens=8, accepted_tokens=3)
FINISHED = [TextEvent(0, "a", (7, 8)), TextEvent(0, "b", (9,), "stop", STATS)]
HALF = TextEvent(1, "x", (5,), None, STATS)


async def events(error: Exception | None) -> AsyncGenerator[TextEvent, None]:
    for event in [*FINISHED, HALF]:
        yield event
    if error:
        raise error
    yield TextEvent(1, "y", (6,), "length", STATS)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_line_has_the_figures_of_its_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> list[TextEvent]:
        return [event async for event in logged(events(None), SEQUENCES)]

    assert asyncio.run(run())[:3] == [*FINISHED, HALF], "events pass as they are"
    first, second = lines(capsys)
    assert (first["request_id"], first["status"], first["finish_reason"]) == ("client/0/f00", 200, "stop")
    assert (first["prompt_tokens"], first["completion_tokens"], first["seconds"] >= 0) == (3, 3, True)
    assert (first["rounds"], first["acceptance_length"], first["budget"]) == (2, 2.5, 4)
    assert set(first["stage_seconds"]) == {"draft", "build", "verify", "accept", "commit"}
    assert (second["request_id"], second["status"], second["finish_reason"]) == ("client/1/f00", 200, "length")


@pytest.mark.parametrize(("error", "status"), [(NotReady("later"), 503), (RuntimeError("not finite"), 500)])
def test_an_error_ends_who_still_runs(capsys: pytest.CaptureFixture[str], error: Exception, status: int) -> None:
    async def run() -> None:
        async for _ in logged(events(error), SEQUENCES):
            pass

    with pytest.raises(type(error)):
        asyncio.run(run())
    assert [(line["status"], line["finish_reason"]) for line in lines(capsys)] == [(200, "stop"), (status, None)]


def test_a_reader_that_leaves_is_a_499(capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        async with aclosing(logged(events(None), SEQUENCES)) as stream:
            await anext(stream)

    asyncio.run(run())
    assert [(line["status"], line["completion_tokens"]) for line in lines(capsys)] == [(499, 2), (499, 0)]
