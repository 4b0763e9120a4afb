"""Names of tokens, and log-probabilities as the API's answers have them, on real tokenizers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from ddtree.deployments.api.answers import AnswerWriter
from ddtree.deployments.api.errors import BadRequest
from ddtree.deployments.api.generation import generate_text
from ddtree.deployments.api.logprobs import CompletionLogprobs, TokenNames
from ddtree.deployments.api.preparation import ApiSettings, Preparation
from ddtree.deployments.api.types import ChatRequest, CompletionRequest, GenerationFields, parse
from ddtree.deployments.requests import Delta, GenerationRequest, TokenLogprobs

TEXTS = ["The capital of France is Paris.", "안녕하세요, 세계!", "👩‍👩‍👧‍👦 and 🇰🇷 done", "naïve\n\n"]
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def prepare(tokenizer: Any) -> Preparation:
    return Preparation(ApiSettings("tiny", 64, 49152, (2,), default_budget=16, max_budget=63), tokenizer)


def scored(*values: float, top: tuple[tuple[int, float], ...] = ()) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(value, 1 + rank, top) for rank, value in enumerate(values))


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_are_the_text(tokenizer: Any, text: str) -> None:
    ids, names = tokenizer.encode(text), TokenNames(tokenizer)
    if (whole := tokenizer.decode(ids)) == text:  # the vocabulary has every byte of it
        assert b"".join(map(names.utf8, ids)) == text.encode()
    logprobs = CompletionLogprobs(tokenizer, names, 0).answer(ids, scored(*[-1.0] * len(ids)))
    offsets = [*logprobs["text_offset"], len(whole)]
    for token, begin, end in zip(logprobs["tokens"], offsets, offsets[1:], strict=False):
        if not token.startswith("bytes:"):
            assert whole[begin:end] == token


def test_a_part_of_a_character_is_named_by_its_bytes(tokenizer: Any) -> None:
    ids, names = tokenizer.encode("한"), TokenNames(tokenizer)
    assert len(ids) > 1, "the test needs a character of several tokens"
    assert "".join(map(names.name, ids)) == r"\xed\x95\x9c"
    assert names.name(ids[0], "bytes:").startswith(r"bytes:\xed")
    assert names.name(tokenizer.eos_token_id) == tokenizer.eos_token
    assert TokenNames(tokenizer, as_ids=True).name(ids[0]) == f"token_id:{ids[0]}"


def test_sentencepiece_tokens_keep_their_space_and_their_byte() -> None:
    vocabulary = {"▁the": 0, "the": 1, "<0xED>": 2, "<0x95>": 3, "<0x9C>": 4, "▁": 5, "<unk>": 6}
    inner = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    fuse = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(fuse)
    names = TokenNames(PreTrainedTokenizerFast(tokenizer_object=inner))
    assert [names.name(token) for token in (0, 1, 2, 5)] == [" the", "the", r"\xed", " "]
    assert b"".join(map(names.utf8, (2, 3, 4))).decode() == "한"


def test_what_the_engine_is_asked(prepare: Preparation) -> None:
    def ask(**fields: Any) -> tuple[int | None, int | None]:
        request = prepare.completion(parse(CompletionRequest, {"prompt": "a b"} | fields))[0].request
        return request.logprobs, request.prompt_logprobs

    assert ask() == (None, None)
    assert ask(logprobs=0) == (0, None)
    assert ask(logprobs=3, echo=True) == (3, 3)
    assert ask(logprobs=3, echo=True, prompt_logprobs=5) == (3, 5)
    assert ask(echo=True, prompt_logprobs=0) == (None, 0)
    chat = parse(ChatRequest, {"messages": [USER], "logprobs": True, "prompt_logprobs": 1})
    asked = prepare.chat(chat)[0].request
    assert (asked.logprobs, asked.prompt_logprobs) == (0, 1)


def test_an_echo_alone(prepare: Preparation, tokenizer: Any) -> None:
    ids = tokenizer.encode("One two")
    whole = prepare.completion(parse(CompletionRequest, {"prompt": [ids], "echo": True, "max_tokens": 0}))[0]
    assert (whole.echo, whole.prompt_only, whole.request.max_tokens) == ("One two", True, 1)
    full = parse(CompletionRequest, {"prompt": [5] * 64, "echo": True, "max_tokens": 0})
    assert prepare.completion(full)[0].request.max_tokens == 1, "a prompt may fill the context"


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        (
            CompletionRequest,
            {"prompt": "a", "logprobs": 21},
            "'logprobs' is wrong: input should be less than or equal to 20",
        ),
        (CompletionRequest, {"prompt": "a", "logprobs": True}, "'logprobs' is wrong"),
        (CompletionRequest, {"prompt": "a", "max_tokens": 0}, "'max_tokens' is 0: .* send echo: true"),
        (
            CompletionRequest,
            {"prompt": "a", "stream": True, "prompt_logprobs": 1},
            "'prompt_logprobs' is not supported with",
        ),
        (CompletionRequest, {"prompt": "a", "top_logprobs": 1}, "'top_logprobs' is not supported"),
        (ChatRequest, {"messages": [USER], "top_logprobs": 1}, "'top_logprobs' needs logprobs: true"),
        (ChatRequest, {"messages": [USER], "logprobs": 1}, "'logprobs' is wrong"),
        (ChatRequest, {"messages": [USER], "max_tokens": 0}, "'max_tokens' is wrong"),
        (ChatRequest, {"messages": [USER], "echo": True}, "'echo' is not supported"),
    ],
)
def test_what_is_refused(kind: type[GenerationFields], fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        parse(kind, fields)


class Deltas:
    """An engine that has its answer."""

    def __init__(self, *deltas: Delta) -> None:
        self._deltas = deltas

    async def generate(self, _: GenerationRequest) -> AsyncIterator[Delta]:
        for delta in self._deltas:
            yield delta


def answers(tokenizer: Any, prepare: Preparation, fields: dict[str, Any], *deltas: Delta) -> list[dict[str, Any]]:
    """The answer, or its chunks."""
    request: GenerationFields
    if "messages" in fields:
        request = parse(ChatRequest, fields)
        sequences = prepare.chat(request)
    else:
        request = parse(CompletionRequest, fields)
        sequences = prepare.completion(request)
    writer = AnswerWriter(request, "tiny", sequences, tokenizer)
    events = generate_text(Deltas(*deltas), sequences[0], tokenizer)  # type: ignore[arg-type]

    async def run() -> list[dict[str, Any]]:
        if request.stream:
            return [json.loads(chunk) async for chunk in writer.chunks(events)]
        return [json.loads(await writer.whole(events))]

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_with_echo_and_half_characters(tokenizer: Any, prepare: Preparation, stream: bool) -> None:
    prompt, answer = tokenizer.encode("One two"), tokenizer.encode(" 한 x")
    top = ((answer[0], -0.5), (7, -3.0))
    fields = {"prompt": "One two", "echo": True, "logprobs": 1, "stream": stream}
    of_prompt = scored(-2.0, top=((9, -1.0), (8, -2.5)))
    deltas = [
        Delta(
            (token,),
            "length" if i == len(answer) - 1 else None,
            None,
            scored(-float(i), top=top),
            () if i else of_prompt,
        )
        for i, token in enumerate(answer)
    ]
    got = [answer["choices"][0] for answer in answers(tokenizer, prepare, fields, *deltas)]
    assert "".join(choice["text"] for choice in got) == "One two 한 x"
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for choice in got:
        for key, values in (choice["logprobs"] or {}).items():
            found[key] += values
    assert found["tokens"][:3] == ["One", " two", *found["tokens"][2:3]]
    assert found["token_logprobs"] == [None, -2.0, *(-float(i) for i in range(len(answer)))]
    assert found["top_logprobs"][0] is None
    assert found["top_logprobs"][1] == {" two": -2.0, tokenizer.decode([9]): -1.0}
    whole = b"".join(map(TokenNames(tokenizer).utf8, prompt + answer)).decode()
    assert whole == "One two 한 x"
    assert found["text_offset"][:3] == [0, 3, 7] and found["text_offset"][-1] == len("One two 한")
    assert found["text_offset"] == sorted(found["text_offset"])
    if stream:
        assert got[0]["text"] == "One two", "the prompt comes first"
        assert len(got) == 1 + len(answer), "tokens without text have their own, too"


def test_a_chat_is_cut_where_its_tokens_are(tokenizer: Any, prepare: Preparation) -> None:
    ids = tuple(tokenizer.encode("One, two, three"))
    fields = {"messages": [USER], "logprobs": True, "top_logprobs": 1, "stop": "two", "prompt_logprobs": 1}
    prompt = prepare.chat(parse(ChatRequest, {"messages": [USER]}))[0].request.prompt_ids
    of_prompt = scored(*[-1.5] * (len(prompt) - 1), top=((5, -0.25), (6, -0.5)))
    found = scored(*(-float(i) for i in range(len(ids))), top=((ids[0], 0.0), (7, -1.0)))
    [answer] = answers(tokenizer, prepare, fields, Delta(ids, "length", None, found, of_prompt))
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "One, "
    content = choice["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == "One, two", "with the token that completes the stop string"
    assert len(content) == answer["usage"]["completion_tokens"]
    first = {"token": "One", "logprob": 0.0, "bytes": [79, 110, 101]}
    assert content[0] == first | {"top_logprobs": [first]}
    assert answer["prompt_logprobs"][0] is None
    own, other = answer["prompt_logprobs"][1].items()
    assert own == (str(prompt[1]), {"logprob": -1.5, "rank": 1, "decoded_token": tokenizer.decode([prompt[1]])})
    assert other == ("5", {"logprob": -0.25, "rank": 1, "decoded_token": tokenizer.decode([5])})


def test_tokens_as_ids(tokenizer: Any, prepare: Preparation) -> None:
    delta = Delta((5,), "length", None, scored(-1.0, top=((5, -1.0), (7, -2.0))), scored(-3.0))
    fields = {"prompt": "One two", "logprobs": 2, "prompt_logprobs": 0, "return_tokens_as_token_ids": True}
    [answer] = answers(tokenizer, prepare, fields, delta)
    found = answer["choices"][0]["logprobs"]
    assert found["tokens"] == ["token_id:5"]
    assert found["top_logprobs"] == [{"token_id:5": -1.0, "token_id:7": -2.0}]
    ((_, own),) = answer["choices"][0]["prompt_logprobs"][1].items()
    assert own["decoded_token"] == " two"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone(tokenizer: Any, prepare: Preparation, stream: bool) -> None:
    fields = {"prompt": "One two", "echo": True, "logprobs": 0, "max_tokens": 0, "stream": stream}
    delta = Delta((2,), "stop", None, scored(-9.0), scored(-2.0))
    got = answers(tokenizer, prepare, fields, delta)
    choices = [answer["choices"][0] for answer in got]
    assert "".join(choice["text"] for choice in choices) == "One two"
    assert choices[0]["logprobs"]["token_logprobs"] == [None, -2.0]
    assert choices[0]["logprobs"]["top_logprobs"] == [None, {" two": -2.0}]
    assert choices[-1]["finish_reason"] == "length"
    if not stream:
        assert got[0]["usage"]["completion_tokens"] == 0


def test_nobody_asks(tokenizer: Any, prepare: Preparation) -> None:
    [answer] = answers(tokenizer, prepare, {"prompt": "One"}, Delta((5,), "length"))
    assert answer["choices"][0]["logprobs"] is None and "prompt_logprobs" not in answer["choices"][0]
