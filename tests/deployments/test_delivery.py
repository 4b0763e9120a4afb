"""A request served by one router after another gives what one router would have given, wherever the seams are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from ddtree.deployments.delivery import Delivery
from ddtree.deployments.requests import Delta, EditParams, GenerationRequest, RequestStats

from .tiny import HORIZON, Engine, Guesser, LocalVerifier, make_target, request

PROMPT, LENGTH = [3, 1, 4, 1, 5, 9, 2, 6], 40


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> LocalVerifier:
    return LocalVerifier(make_target(tmp_path_factory.mktemp("target")))


class Router(Engine):
    """A new router: it knows nothing, and its pool is empty. Its drafter knows the answer."""

    def __init__(self, verifier: LocalVerifier, asked: GenerationRequest, answer: list[int]) -> None:
        super().__init__(verifier)
        self._asked, self.deltas = asked, list[Delta]()
        self.loop.add_drafter(Guesser("d", {asked.request_id: answer}, seed=len(asked.prompt_ids)))
        self.loop._emit = lambda outgoing: self.deltas.extend(delta for _, delta in outgoing)  # type: ignore[misc]

    def serve(self) -> Iterator[Delta]:
        self.add(self._asked)
        while True:
            self.loop.run()
            yield from self.deltas
            self.deltas.clear()


def deliver(verifier: LocalVerifier, asked: GenerationRequest, answer: list[int], seams: list[int]) -> list[Delta]:
    """All deltas. The router is lost when it has sent so many of them, and the next one takes over."""
    delivery, taken = Delivery(asked), list[Delta]()
    for seam in [*seams, LENGTH + 1]:
        for i, delta in enumerate(Router(verifier, delivery.rest(), answer).serve()):
            if i == seam:
                break
            taken.append(delivery.take(delta))
            if delta.finish_reason:
                return taken
    raise AssertionError("it does not end")


EDITS = EditParams(frequency_penalty=0.4, presence_penalty=-0.5, repetition_penalty=1.2, min_tokens=LENGTH)


@pytest.mark.parametrize(
    ("temperature", "edits"), [(0.0, None), (0.9, None), (0.9, EDITS)], ids=["greedy", "drawn", "edited"]
)
@pytest.mark.parametrize("seams", [[0], [1], [3], [2, 0, 4], [1, 1, 1]], ids=str)
def test_no_seam_shows(verifier: LocalVerifier, seams: list[int], temperature: float, edits: EditParams | None) -> None:
    asked = request(f"r{temperature}", PROMPT, LENGTH, 12, temperature, edits=edits)
    asked = replace(asked, stop_token_ids=tuple(range(30)) if edits else ())
    alone = deliver(verifier, replace(asked, budget=0), [], [])
    answer = [token for delta in alone for token in delta.token_ids]
    deltas = deliver(verifier, asked, PROMPT + answer, seams)
    assert [token for delta in deltas for token in delta.token_ids] == answer
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    stats = deltas[-1].stats
    assert stats is not None and stats.budget == 12
    assert sum(stats.acceptance_histogram) == stats.rounds, "every round is counted once"
    assert sum(i * n for i, n in enumerate(stats.acceptance_histogram)) == stats.accepted_tokens
    prefills = 1 + sum(seam > 0 for seam in seams)  # each gives a token that is of no round
    cut = stats.rounds + stats.accepted_tokens + prefills - LENGTH  # the last round may be told to stop in its middle
    assert 0 <= cut <= HORIZON
    assert stats.stage_seconds["verify"] > 0 and stats.prefill_seconds > 0


@pytest.mark.parametrize("seams", [[0], [1], [0, 2, 1]], ids=str)
def test_log_probabilities_come_once(verifier: LocalVerifier, seams: list[int]) -> None:
    """Those of the prompt with the first token, whichever router sends it."""
    asked = replace(request("r", PROMPT, LENGTH, 12, 0.9), logprobs=2, prompt_logprobs=1)
    alone = deliver(verifier, replace(asked, budget=0), [], [])
    answer = [token for delta in alone for token in delta.token_ids]
    deltas = deliver(verifier, asked, PROMPT + answer, seams)
    assert [len(delta.prompt_logprobs) for delta in deltas] == [len(PROMPT) - 1] + [0] * (len(deltas) - 1)
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
    for part in ("logprobs", "prompt_logprobs"):
        expected, got = ([one for delta in found for one in getattr(delta, part)] for found in (alone, deltas))
        assert [one.logprob for one in got] == pytest.approx([one.logprob for one in expected], abs=1e-4)
        assert [one.rank for one in got] == [one.rank for one in expected]


@pytest.mark.parametrize("sent", [0, 1, 7])
def test_a_stop_token_ends_it_where_it_would_have(verifier: LocalVerifier, sent: int) -> None:
    plain = deliver(verifier, request("p", PROMPT, LENGTH, 0), [], [])
    answer = [token for delta in plain for token in delta.token_ids]
    stop = next(token for i, token in enumerate(answer) if i > 10 and token not in answer[:i])
    asked = replace(request("s", PROMPT, LENGTH, 0), stop_token_ids=(stop,))
    deltas = deliver(verifier, asked, [], [sent])
    assert [token for delta in deltas for token in delta.token_ids] == answer[: answer.index(stop) + 1]
    assert deltas[-1].finish_reason == "stop"


def test_what_is_asked_of_the_next_router() -> None:
    asked = request("name/0/id", PROMPT, 20, 4, 0.7)
    delivery = Delivery(asked)
    assert delivery.rest() == asked
    delivery.take(Delta((7, 8), stats=RequestStats(cached_tokens=4)))
    rest = delivery.rest()
    assert rest == replace(asked, request_id="name/0/id~1", prompt_ids=(*PROMPT, 7, 8), max_tokens=18, resumed=2)
    figures = delivery.take(Delta((9,), stats=RequestStats(cached_tokens=len(PROMPT) + 2))).stats
    assert figures is not None and figures.cached_tokens == len(PROMPT), "tokens of the answer are no prompt"
    assert delivery.rest().request_id == "name/0/id~2"
