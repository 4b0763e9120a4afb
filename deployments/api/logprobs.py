"""Log-probabilities as OpenAI and vLLM shape them, and the names that tokens have in them. Knows a tokenizer; no HTTP, no engine.

A token whose bytes are no whole character is written as OpenAI writes it: `\\xf0\\x9f` in a chat, in a completion
`bytes:\\xf0\\x9f`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from ddtree.deployments.api.text import REPLACEMENT, Detokenizer
from ddtree.deployments.requests import TokenLogprobs

SPACE = (
    "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space at a token's start, which decoders drop at a text's
)
BYTE = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's token of a single byte


class TokenNames:
    """What single tokens are called."""

    def __init__(self, tokenizer: Any, as_ids: bool = False) -> None:
        """`tokenizer`: a Hugging Face one. `as_ids`: names are `token_id:ID`."""
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self._found: dict[int, bytes] = {}  # by token

    def utf8(self, token: int) -> bytes:
        """What the token adds to a text in UTF-8; of a special token, its name."""
        if token not in self._found:
            self._found[token] = self._find(token)
        return self._found[token]

    def name(self, token: int, prefix: str = "") -> str:
        """Its text; `prefix` and its bytes where they are no text."""
        if self._as_ids:
            return f"token_id:{token}"
        raw = self.utf8(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return prefix + raw.decode(errors="backslashreplace")

    def _find(self, token: int) -> bytes:
        text: str = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        piece: str = self._tokenizer.convert_ids_to_tokens(token) or ""
        if REPLACEMENT in text:
            if byte := BYTE.fullmatch(piece):
                return bytes([int(byte[1], 16)])
            if all(char in _byte_alphabet() for char in piece):
                return bytes(_byte_alphabet()[char] for char in piece)
        if piece.startswith(SPACE) and not text.startswith(" "):
            text = " " + text
        return text.encode()


class CompletionLogprobs:
    """The `logprobs` of one choice of /v1/completions, part by part."""

    def __init__(self, tokenizer: Any, names: TokenNames, top: int) -> None:
        self._tokenizer, self._names, self._top = tokenizer, names, top
        self._end = 0  # of the text so far, in characters
        self._detokenizer = Detokenizer(tokenizer)

    def prompt(self, ids: Sequence[int], found: Sequence[TokenLogprobs], text: str) -> dict[str, Any]:
        """Of the prompt that is echoed as `text`: the first token has none."""
        part = self.answer(ids, [None, *found])
        self._end, self._detokenizer = len(text), Detokenizer(self._tokenizer)
        return part

    def answer(self, ids: Sequence[int], found: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """Of the next tokens. Each begins where the text ends that is certain before it."""
        offsets = []
        for token in ids:
            offsets.append(self._end)
            self._end += len(self._detokenizer.push([token]))
        return {
            "tokens": [self._name(token) for token in ids],
            "token_logprobs": [one and one.logprob for one in found],
            "top_logprobs": [one and self._others(token, one) for token, one in zip(ids, found, strict=True)],
            "text_offset": offsets,
        }

    def _others(self, token: int, found: TokenLogprobs) -> dict[str, float]:
        """The token's own and the most probable ones."""
        out = {self._name(token): found.logprob}
        for other, value in found.top[: self._top]:
            out.setdefault(self._name(other), value)
        return out

    def _name(self, token: int) -> str:
        return self._names.name(token, "bytes:")


def together(parts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]] | None:
    """Parts of one choice's `logprobs` as one; None of none."""
    return {key: [x for part in parts for x in part[key]] for key in parts[0]} if parts else None


def chat_logprobs(names: TokenNames, ids: Sequence[int], found: Sequence[TokenLogprobs], top: int) -> dict[str, Any]:
    """The `logprobs` of tokens of a chat."""

    def one(token: int, value: float) -> dict[str, Any]:
        return {"token": names.name(token), "logprob": value, "bytes": list(names.utf8(token))}

    each = zip(ids, found, strict=True)
    content = [
        one(token, own.logprob) | {"top_logprobs": [one(*other) for other in own.top[:top]]} for token, own in each
    ]
    return {"content": content}


def prompt_logprobs(names: TokenNames, ids: Sequence[int], found: Sequence[TokenLogprobs], top: int) -> list[Any]:
    """vLLM's `prompt_logprobs`: null for the first token, then by token id the prompt's own and the most probable ones."""
    out: list[Any] = [None]
    for token, one in zip(ids[1:], found, strict=True):
        ranked = {token: (one.logprob, one.rank)}
        for rank, (other, value) in enumerate(one.top[:top], start=1):
            ranked.setdefault(other, (value, rank))
        out.append(
            {
                str(i): {"logprob": value, "rank": rank, "decoded_token": names.name(i)}
                for i, (value, rank) in ranked.items()
            }
        )
    return out


@cache
def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in the vocabularies of byte-level tokenizers: itself where it can be printed."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + i): byte for i, byte in enumerate(others)}
