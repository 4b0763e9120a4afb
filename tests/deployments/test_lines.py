"""Lines: what many requests get, in one message. What dies on the way is in test_links.py and test_faults.py."""

from __future__ import annotations

import asyncio
import threading
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError

from ddtree.deployments.errors import GrammarError, NotReady
from ddtree.deployments.lines import Line, Stream, portable
from ddtree.deployments.requests import Delta, RequestStats, TokenLogprobs
from ddtree.deployments.scheduler import QueueFull


def test_a_message_has_what_all_requests_got_and_ends_those_that_are_done() -> None:
    async def run() -> None:
        line = Line()
        with line.request("a") as a, line.request("b") as b, line.request("c") as c:
            for request_id, item in (("a", Delta((1,))), ("b", Delta((2,), "stop")), ("a", Delta((3,)))):
                line.put(request_id, item)
            line.put("c", NotReady("later"))
            items = await line.take(1)
            assert [request_id for request_id, _ in items] == ["a", "b", "a", "c"]
            assert (a.is_set(), b.is_set(), c.is_set()) == (False, True, True)
            assert await line.take(0.01) == [] and not line.idle
            line.close()
            assert a.is_set(), "nobody reads what it would get"
        assert line.idle

    asyncio.run(run())


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=6), st.booleans())
def test_a_stream_gives_every_token_once_and_in_order(rounds: list[list[int]], fails: bool) -> None:
    async def run() -> None:
        stream = Stream("a")
        for i, tokens in enumerate(rounds):
            found = tuple(TokenLogprobs(-float(token), 1, ()) for token in tokens)
            last = i == len(rounds) - 1 and not fails
            stream.put(Delta(tuple(tokens), "stop" if last else None, RequestStats(rounds=i), found))
        if fails:
            stream.put(NotReady("gone"))
        delta = await stream.next()
        assert list(delta.token_ids) == list(chain(*rounds))
        assert [-one.logprob for one in delta.logprobs] == list(chain(*rounds))
        assert delta.stats and delta.stats.rounds == len(rounds) - 1
        assert delta.finish_reason == (None if fails else "stop")
        if fails:
            with pytest.raises(NotReady, match="gone"):
                await stream.next()

    asyncio.run(run())


class Locked(Exception):
    """Cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


def test_errors_arrive_as_what_they_are_unless_they_cannot() -> None:
    for error in (GrammarError("no"), NotReady("later"), QueueFull("full")):
        there = portable(error)
        assert type(there) is type(error) and str(there) == str(error)
    assert str(portable(Locked())) == "Locked: locked"
    there = portable(ActorDiedError())
    assert type(there) is RuntimeError, "else a rank's death were taken for the router's"
