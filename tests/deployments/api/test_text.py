"""Incremental decoding and stop strings, on the real tokenizer, for any way of splitting the ids."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ddtree.deployments.api.text import Detokenizer, StopScanner, TextStream

TEXTS = [
    "The capital of France is Paris.",
    "안녕하세요, 세계! 오늘은 날씨가 좋네요.",
    "👩‍👩‍👧‍👦 and 🇰🇷, 😀😃 done",
    "def f(x):\n    return x  # naïve café\n\n",
    "a\ufffdb",
]
texts = st.one_of(st.sampled_from(TEXTS), st.text(max_size=40))
relaxed = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def decode(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def split(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    """Cut `ids` into deltas of one token or more, anywhere."""
    deltas = []
    while ids:
        n = data.draw(st.integers(1, min(len(ids), 9)))
        deltas.append(ids[:n])
        ids = ids[n:]
    return deltas


@relaxed
@given(text=texts, data=st.data())
def test_deltas_concatenate_to_the_text(tokenizer: Any, text: str, data: st.DataObject) -> None:
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(delta) for delta in split(data, ids)]
    whole = decode(tokenizer, ids)  # has U+FFFD where the vocabulary lacks a byte of the text
    assert "\ufffd" in whole or not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.finish() == decode(tokenizer, ids)


@relaxed
@given(ids=st.lists(st.integers(0, 49_151), max_size=30), data=st.data())
def test_any_ids_with_special_tokens_and_broken_utf8(tokenizer: Any, ids: list[int], data: st.DataObject) -> None:
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(delta) for delta in split(data, ids)]
    assert "".join(pieces) + detokenizer.finish() == decode(tokenizer, ids)


def test_a_character_is_held_until_it_is_whole(tokenizer: Any) -> None:
    ids = tokenizer.encode("한")
    assert len(ids) > 1, "the test needs a character of several tokens"
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([token]) for token in ids] == [""] * (len(ids) - 1) + ["한"]


def test_a_sequence_that_stays_broken_comes_out_at_the_end(tokenizer: Any) -> None:
    ids = tokenizer.encode("x한")[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids) == "x"
    assert detokenizer.finish() == "\ufffd"


def expected(text: str, stop: list[str]) -> str | None:
    """The definition: read the text a character at a time; the first stop string to be complete ends it."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return None


@given(
    text=st.text("abc", max_size=25),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    data=st.data(),
)
@example(text="abcd", stop=["abcd", "bc"], data=None)
def test_stop_scanner_equals_its_definition(text: str, stop: list[str], data: st.DataObject | None) -> None:
    scanner, out, rest, stopped = StopScanner(stop), "", text, False
    while rest and not stopped:
        n = data.draw(st.integers(1, len(rest))) if data else len(rest)
        piece, stopped = scanner.push(rest[:n])
        out, rest = out + piece, rest[n:]
    if not stopped:
        out += scanner.finish()
    cut = expected(text, stop)
    assert stopped == (cut is not None)
    assert out == (text if cut is None else cut)


@relaxed
@given(
    data=st.data(), text=st.sampled_from(TEXTS[:4]), stop=st.sampled_from(["is", "세계", "😃", "return x", "a", "\n\n"])
)
def test_a_stop_string_ends_at_one_token_however_ids_arrive(
    tokenizer: Any, data: st.DataObject, text: str, stop: str
) -> None:
    ids = tokenizer.encode(text)
    fits = [n for n in range(len(ids) + 1) if stop in decode(tokenizer, ids[:n])]
    stream, out, count, stopped = TextStream(tokenizer, [stop]), "", 0, False
    for delta in split(data, ids):
        step = stream.push(delta)
        out, count, stopped = out + step.text, count + step.n_tokens, step.stopped
        if stopped:
            break
    if not stopped:
        out += stream.finish().text
    assert stopped == bool(fits)
    assert out == text.split(stop)[0]
    assert count == (fits[0] if fits else len(ids))


@relaxed
@given(data=st.data(), stop=st.sampled_from([["ab"], ["a", "b c"], ["ab", "abc", " ab"]]), least=st.integers(0, 12))
def test_a_stop_string_within_min_tokens_is_text(
    tokenizer: Any, data: st.DataObject, stop: list[str], least: int
) -> None:
    """It may begin there, but must be completed by a later token."""
    ids = tokenizer.encode("x ab abc b c ab b ca abab c")
    texts = [decode(tokenizer, ids[:n]) for n in range(len(ids) + 1)]
    ends = [
        (n, end, end - len(s))
        for n in range(least + 1, len(ids) + 1)
        for s in stop
        for end in range(len(texts[n - 1]) + 1, len(texts[n]) + 1)
        if texts[n][:end].endswith(s)
    ]
    stream, out, count = TextStream(tokenizer, stop, least), "", 0
    for delta in split(data, ids):
        step = stream.push(delta)
        out, count = out + step.text, count + step.n_tokens
        if step.stopped:
            break
    else:
        out += stream.finish().text
    token, _, cut = min(ends, default=(len(ids), 0, len(texts[-1])))
    assert (count, out) == (token, texts[-1][:cut])


def test_a_suffix_that_could_be_a_stop_string_is_released_at_the_end(tokenizer: Any) -> None:
    stream = TextStream(tokenizer, ["END of it"])
    pushed = stream.push(tokenizer.encode("this is the END"))
    assert pushed.text == "this is the "
    assert stream.finish().text == "END"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopScanner(["a", ""])
