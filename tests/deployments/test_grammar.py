"""Answers that follow a grammar: valid, the same with drafts as without, and every node judged by its own path."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from ddtree.deployments.errors import GrammarError
from ddtree.deployments.forced import forced
from ddtree.deployments.grammar import Grammars, tokenizer_of, why_not
from ddtree.deployments.requests import Delta, EditParams, GenerationRequest, SamplingParams
from ddtree.deployments.round_loop import PeerLost
from ddtree.deployments.scheduler import Entry
from ddtree.deployments.sequence import Sequence
from ddtree.drafter.items import Candidates
from ddtree.verifier.batch import TokenMasks
from ddtree.verifier.edits import BANNED
from ddtree.verifier.masks import mask

from .tiny import EOS, GRAMMARS, VOCABULARY, Engine, Guesser, Letters, LocalVerifier, make_target, plain

OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> LocalVerifier:
    return LocalVerifier(make_target(tmp_path_factory.mktemp("target")))


regexes = st.recursive(
    st.sampled_from(["a", "b", "ab", "0", "12", "[0-9]", "[a-f]{2}"]),
    lambda part: st.one_of(
        st.tuples(part, part).map("".join),
        st.tuples(part, part).map(lambda both: f"({both[0]}|{both[1]})"),
        st.tuples(part, st.sampled_from(["*", "?", "+", "{2,4}"])).map(lambda both: f"({both[0]}){both[1]}"),
    ),
    max_leaves=6,
)
tokens = st.integers(0, VOCABULARY - 1)
asked = st.builds(
    GenerationRequest,
    request_id=st.just(""),
    prompt_ids=st.lists(tokens, min_size=1, max_size=20).map(tuple),
    max_tokens=st.integers(1, 14),
    stop_token_ids=st.just((EOS,)),
    sampling=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.7, 1.0]),
        top_k=st.sampled_from([0, 5]),
        seed=st.integers(0, 99),
        edits=st.sampled_from(
            [None, EditParams(min_tokens=4), EditParams(frequency_penalty=2, logit_bias=((EOS, 9.0),))]
        ),
    ),
    budget=st.sampled_from([0, 3, 15, 40]),
)


def text(ids: list[int]) -> str:
    return b"".join(Letters.tokens[token] for token in ids if token != EOS).decode()


@given(st.lists(st.tuples(asked, st.none() | regexes), min_size=1, max_size=4), st.integers(0, 1000), st.integers(0, 6))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_output_is_plain_and_valid(
    verifier: LocalVerifier, wanted: list[tuple[GenerationRequest, str | None]], seed: int, dies: int
) -> None:
    """Beside requests that have no grammar, over the death of a verifier, in a pool that makes some of them wait."""
    requests = [
        dataclasses.replace(r, request_id=f"r{i}", grammar=expression and LLMatcher.grammar_from_regex(expression))
        for i, (r, expression) in enumerate(wanted)
    ]
    truth = {r.request_id: plain(verifier, r) for r in requests}
    verifier.pages, kept = 22, verifier.pages
    engine = Engine(verifier)
    verifier.pages = kept
    answers = {r.request_id: [*r.prompt_ids, *truth[r.request_id]] for r in requests}
    engine.loop.add_drafter(Guesser("d", answers, seed, errs=0.2))
    for r in requests:
        engine.add(r)
    engine.run_over_a_death(dies)
    assert engine.output == truth
    for r, (_, expression) in zip(requests, wanted, strict=True):
        last, answer = engine.last[r.request_id], truth[r.request_id]
        assert isinstance(last, Delta)
        if expression and last.finish_reason == "stop":
            assert re.fullmatch(expression, text(answer))
        elif expression:
            assert len(answer) == r.max_tokens
            assert GRAMMARS.start(r.grammar or "", answer), "the beginning of an answer"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_taken_inside_a_grammar(verifier: LocalVerifier, temperature: float) -> None:
    grammar = LLMatcher.grammar_from_json_schema(OBJECT)
    sampling = SamplingParams(temperature, seed=5, edits=EditParams(logit_bias=((Letters.tokens.index(b" "), -50.0),)))
    request = GenerationRequest("r", (1, 2, 3), 40, (EOS,), sampling, 15, grammar=grammar)
    truth = plain(verifier, request)
    engine = Engine(verifier)
    engine.loop.add_drafter(Guesser("d", {"r": [*request.prompt_ids, *truth]}, 2, errs=0.0))
    engine.add(request)
    engine.run()
    assert engine.output["r"] == truth
    stats = engine.last["r"].stats  # type: ignore[union-attr]
    assert stats.accepted_tokens > stats.rounds


def test_an_answer_goes_on_at_another_router(verifier: LocalVerifier) -> None:
    grammar = LLMatcher.grammar_from_regex("[ab]{3}(12)+[a-f]{4}")
    first = GenerationRequest("r", (7, 8, 9), 14, (EOS,), SamplingParams(1.0, seed=3), 15, grammar=grammar)
    truth = plain(verifier, first)
    for at in range(1, len(truth)):
        rest = dataclasses.replace(
            first, prompt_ids=(*first.prompt_ids, *truth[:at]), max_tokens=first.max_tokens - at, resumed=at
        )
        assert plain(verifier, rest) == truth[at:]


def test_an_end_that_is_ignored_is_followed_by_ends(verifier: LocalVerifier) -> None:
    request = GenerationRequest("r", (1, 2), 9, (), SamplingParams(1.0), 15, grammar='start: "ab" "12"')
    truth = plain(verifier, request)
    assert text(truth) == "ab12" and truth[-5:] == [EOS] * 5
    engine = Engine(verifier)
    engine.loop.add_drafter(Guesser("d", {"r": [*request.prompt_ids, *truth]}, 2, errs=0.0))
    engine.add(request)
    engine.run()
    assert engine.output["r"] == truth


def test_a_grammar_s_end_outweighs_min_tokens(verifier: LocalVerifier) -> None:
    for temperature in (0.0, 0.3, 1.0, 2.0):
        sampling = SamplingParams(temperature, edits=EditParams(min_tokens=9))
        request = GenerationRequest("r", (1, 2), 12, (EOS,), sampling, grammar='start: "ab" "12"?')
        assert text(plain(verifier, request)) == "ab12", "as long as it can be"


trees = st.lists(st.tuples(st.integers(0, 100), st.integers(0, VOCABULARY - 1)), max_size=40)


@given(regexes | st.just("(ab|12|[a-f0-9])*"), trees, st.lists(tokens, max_size=5))
@settings(max_examples=60, deadline=None)
def test_a_node_s_mask_is_that_of_its_path_alone(
    expression: str, drafted: list[tuple[int, int]], sent: list[int]
) -> None:
    grammar = LLMatcher.grammar_from_regex(expression)
    state = GRAMMARS.start(grammar)
    answer: list[int] = []
    for token in sent:  # as many as the grammar has
        if token != EOS and allows(fresh(grammar, answer), token):
            answer.append(token)
            state.advance([token])
    nodes, parents, paths = [0], [-1], [list(answer)]
    for at, token in drafted:
        parents.append(at % len(nodes))
        nodes.append(token)
        paths.append([*paths[parents[-1]], token])
    for _ in range(2):  # a walk leaves the state as it was
        found = state.masks(nodes, parents)
        for node, got in found.items():
            assert got == (END if EOS in paths[node] else fresh(grammar, paths[node]))
    for node, parent in list(enumerate(parents))[1:]:
        reached = parent in found and allows(found[parent], nodes[node])
        assert (node in found) == reached


END = (1 << EOS).to_bytes(8, "little")  # the mask that lets an answer end, and nothing else


def fresh(grammar: str, path: list[int]) -> bytes:
    state = GRAMMARS.start(grammar)
    matcher = LLMatcher(state._tokenizer, grammar, log_level=0)
    assert matcher.consume_tokens(path)
    return matcher.compute_bitmask()


def allows(found: bytes, token: int) -> bool:
    return bool(found[token // 8] >> token % 8 & 1)


def test_end_of_sequence_is_allowed_where_the_grammar_accepts() -> None:
    state = GRAMMARS.start('start: "a" "b"?')
    a, b = Letters.tokens.index(b"a"), Letters.tokens.index(b"b")
    assert not allows(state.masks([0], [-1])[0], EOS)
    state.advance([a])
    assert [allows(state.masks([0], [-1])[0], token) for token in (a, b, EOS)] == [False, True, True]
    state.advance([b])
    assert [allows(state.masks([0], [-1])[0], token) for token in (a, b, EOS)] == [False, False, True]
    state.advance([EOS])
    assert [allows(state.masks([0], [-1])[0], token) for token in (a, b, EOS)] == [False, False, True]
    unused = range(len(Letters.tokens), VOCABULARY)
    assert not any(allows(GRAMMARS.start("start: /(.|\\n)*/").masks([0], [-1])[0], token) for token in unused)


END_ID = 2  # of SmolLM2


@pytest.fixture(scope="module")
def tokenizer(target_dir: Path) -> LLTokenizer:
    return tokenizer_of(target_dir, 49152, (END_ID,))


def test_masks_of_a_real_tokenizer(tokenizer: LLTokenizer) -> None:
    """It writes what is forced in one way only; what a round asks for before must not show in a mask."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    grammar = f'start: TEXT | opened " x" %json {json.dumps(schema)}\nopened[lazy]: TEXT "<call>"\nTEXT: /(.|\\n)*/'
    ids = tokenizer.tokenize_str('Let me see. <call> x{"city": "Paris, in the north"}')
    state, random = Grammars(lambda: tokenizer).start(grammar), torch.Generator().manual_seed(0)
    for at in range(0, len(ids), 2):
        nodes, parents, paths = [0], [-1], [ids[:at]]
        for depth in range(4):  # the answer's own tokens, and beside each of them others
            other = ids[int(torch.randint(len(ids), (), generator=random))]
            for token in (*ids[at + depth : at + depth + 1], other, END_ID):
                parents.append(max(node for node, path in enumerate(paths) if path == ids[: at + depth]))
                nodes.append(token)
                paths.append([*paths[parents[-1]], token])
        state.forced()
        found = state.masks(nodes, parents)
        for node, got in found.items():
            assert len(got) == 49152 // 8
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
            if END_ID in paths[node]:
                assert got == (1 << END_ID).to_bytes(len(got), "little")
            else:
                assert matcher.consume_tokens(paths[node])
                assert matcher.compute_bitmask()[: len(got)] == got
        assert len(found) > len(ids[at : at + 4])
        state.advance(ids[at : at + 2])


def test_what_a_grammar_forces_is_drafted(tokenizer: LLTokenizer) -> None:
    """And what was guessed for the tokens after it stays. (The tiny vocabulary writes nothing in one way only.)"""
    state = Grammars(lambda: tokenizer).start('start: "One, two, " /[a-z]+/')
    ids, must = tokenizer.tokenize_str("One, two, three"), state.forced()
    assert ids[: len(must)] == must and len(must) >= 3
    bound, free = (Sequence(GenerationRequest(name, (1,), 9), 0.0) for name in "ab")
    bound.grammar = state
    guesses = torch.arange(2 * (len(must) + 1) * 3).int().view(2, -1, 3)
    logprobs = torch.full(guesses.shape, -1.0)
    entries = [Entry(sequence, 4, 3, True) for sequence in (free, bound)]
    drafted = Candidates(logprobs, guesses)
    found = forced(drafted, entries)
    got_logprobs, got = found.logprobs, found.ids
    assert got[1, :-1, 0].tolist() == must
    assert got_logprobs[1, :-1].tolist() == [[0, -torch.inf, -torch.inf]] * len(must)
    for before, after in ((logprobs, got_logprobs), (guesses, got)):
        assert torch.equal(before[0], after[0]) and torch.equal(before[1, -1], after[1, -1])
    below = torch.full((2, len(must), 3, 3), -2.0)
    by_parent = forced(Candidates(logprobs, guesses, below), entries)
    assert torch.equal(by_parent.logprobs, got_logprobs) and torch.equal(by_parent.ids, got)
    assert by_parent.conditional is not None and torch.equal(by_parent.conditional[0], below[0])
    assert by_parent.conditional[1, :-1].tolist() == [[[0, -torch.inf, -torch.inf]] * 3] * (len(must) - 1)
    assert by_parent.conditional[1, -1].tolist() == [[-1] * 3, [-2] * 3, [-2] * 3]
    assert (
        (below == -2).all()
        and (logprobs == -1).all()
        and torch.equal(guesses.flatten(), torch.arange(guesses.numel()).int())
    )
    state.advance(ids)
    assert state.forced() == []
    assert forced(drafted, entries) is drafted


def test_what_makes_no_sense_is_said() -> None:
    assert why_not('start: "a"') is None
    assert "unclosed group" in str(why_not(LLMatcher.grammar_from_regex("(a")))
    with pytest.raises(GrammarError, match="unclosed group"):
        GRAMMARS.start(LLMatcher.grammar_from_regex("(a"))
    with pytest.raises(GrammarError, match="doesn't satisfy the grammar"):
        GRAMMARS.start('start: "a"', [0])


def test_a_grammar_that_is_too_much_fails_only_where_the_answer_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts run into llguidance's limits before the answer does."""

    def limited(tokenizer: object, grammar: str, log_level: int = 0) -> LLMatcher:
        return LLMatcher(tokenizer, grammar, log_level=log_level, limits=LLParserLimits(max_lexer_states=40))  # type: ignore[arg-type]

    monkeypatch.setattr("ddtree.deployments.grammar.LLMatcher", limited)
    a, b = Letters.tokens.index(b"a"), Letters.tokens.index(b"b")
    path = [a, b, b, a, a, a, b, a, b, b, b, a, a, b, a, b, a, a, b, b]
    grammar = LLMatcher.grammar_from_regex("[ab]*a[ab]{18}c")
    state = GRAMMARS.start(grammar)
    found = state.masks([0, *path], range(-1, len(path)))
    assert 1 < len(found) <= len(path), "llguidance gave up on the way"
    stuck = max(found)
    assert not any(found[stuck])
    state.advance(path[:2])
    assert allows(state.masks([0], [-1])[0], a)
    state = GRAMMARS.start(grammar)
    state.masks([0, *path], range(-1, len(path)))
    with pytest.raises(GrammarError, match="too many states"):
        state.advance([*path[:stuck], a])


@given(st.lists(st.sets(st.integers(0, 36)), min_size=1, max_size=5), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_masks_are_their_definition(sets: list[set[int]], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, 37, generator=random)
    logits[:, 3] = BANNED
    logits[6, 5] = torch.inf
    rows = torch.randperm(7, generator=random)[: len(sets)]
    bits = np.zeros((len(sets), 64), np.uint8)
    for i, allowed in enumerate(sets):
        bits[i, list(allowed)] = 1
    words = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    got = mask(logits.clone(), TokenMasks(rows.int(), torch.arange(len(sets)).int(), words))
    expected = logits.clone()
    for row, allowed in zip(rows.tolist(), sets, strict=True):
        for token in range(37):
            if token not in allowed:
                expected[row, token] = BANNED
        if allowed == {3}:
            expected[row, 3] = 0.0
    assert torch.equal(got[:6], expected[:6])
    assert not torch.isfinite(got[6]).all(), "it stays a row to draw nothing from"


def test_a_state_outlives_its_verifier(verifier: LocalVerifier) -> None:
    grammar = LLMatcher.grammar_from_regex("(ab|12){5}")
    request = GenerationRequest("r", (1, 2, 3), 14, (EOS,), SamplingParams(1.0, seed=1), 0, grammar=grammar)
    truth = plain(verifier, request)
    engine = Engine(verifier)
    engine.add(request)
    for _ in range(3):
        engine.loop.run()
    verifier.fail_next = True
    with pytest.raises(PeerLost):
        engine.loop.run()
    engine.loop.verifier_lost()
    engine.run()
    assert engine.output["r"] == truth
