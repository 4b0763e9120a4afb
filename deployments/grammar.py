"""Which tokens a grammar allows next: llguidance's view of a model's tokenizer, made on first use, and a state per sequence.

A state stands after the tokens that were committed. It walks a draft tree down and back, so that each node is judged by its own
path, and moves on only when told what came of it. Knows token ids; no request, no tensors and no Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from ddtree.deployments.errors import GrammarError


def why_not(grammar: str) -> str | None:
    """What llguidance finds wrong with a grammar in its own form, without a tokenizer; None: nothing."""
    return LLMatcher.validate_grammar(grammar) or None


def tokenizer_of(model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """llguidance's view of a model's tokenizer, with an id for each logit. Takes about a second and holds the interpreter."""
    from llguidance.hf import from_tokenizer
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    return from_tokenizer(tokenizer, n_vocab=max(vocab_size, len(tokenizer)), eos_token=list(eos_token_ids))


class Grammars:
    """Starts the states of one model's sequences. Any thread may call it."""

    def __init__(self, tokenizer: Callable[[], LLTokenizer]) -> None:
        """`tokenizer` is called once, when the first sequence wants it."""
        self._make, self._lock = tokenizer, Lock()
        self._tokenizer: LLTokenizer | None = None

    def start(self, grammar: str, answer: Sequence[int] = ()) -> GrammarState:
        """The state of a sequence whose answer has these tokens so far. Raises GrammarError."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._make()
        return GrammarState(self._tokenizer, grammar, answer)


class GrammarState:
    """Where one sequence is in its grammar. A mask is the bytes of ceil(V / 32) words, little endian: bit i stands for token i.

    A grammar can turn out to be too much for llguidance's limits after any token. A draft may run into that where the answer
    never goes, so it counts only when the answer gets there.
    """

    def __init__(self, tokenizer: LLTokenizer, grammar: str, answer: Sequence[int]) -> None:
        """Raises GrammarError where the grammar makes no sense, or the answer is none of it."""
        self._tokenizer, self._grammar = tokenizer, grammar
        self._eos = frozenset(tokenizer.eos_tokens)
        self._answer: list[int] = []
        self._ended = False  # the answer has an end-of-sequence token: only such may follow
        self._stuck: dict[tuple[int, ...], str] = {}  # paths from here after which llguidance gave up, and why
        self._matcher = self._match(())
        self.advance(answer)
        self._root: bytes | None = self._allowed() if not self._ended else None  # computed here: the first one is slow

    def advance(self, tokens: Sequence[int]) -> None:
        """Take tokens that were committed. Raises GrammarError where the grammar does not go on like this, or is too much."""
        tokens = list(tokens)
        for n in range(len(tokens)):
            if (path := tuple(tokens[:n])) in self._stuck:
                raise GrammarError(self._stuck[path])
        self._stuck, self._root = {}, None
        end = next((i for i, token in enumerate(tokens) if token in self._eos), None)
        taken = [] if self._ended else tokens[:end]
        self._ended |= end is not None
        if not self._matcher.consume_tokens(taken):
            raise GrammarError(self._why())
        self._answer += taken

    def forced(self) -> list[int]:
        """The tokens that must come next, as far as there is one way to go on and the tokenizer writes it in one way only."""
        if self._ended or self._matcher.is_error():
            return []
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens

    def masks(self, tokens: Sequence[int], parents: Sequence[int]) -> dict[int, bytes]:
        """The mask after each node of a tree that the target may reach, by node.

        Args:
            tokens: of the nodes; that of node 0, the root, is committed already.
            parents: the node before each, which has a smaller number; negative for the root and for padding.
        """
        children: dict[int, list[tuple[int, int]]] = {}
        for node, parent in enumerate(parents):
            if parent >= 0:
                children.setdefault(parent, []).append((node, tokens[node]))
        found: dict[int, bytes] = {}
        if self._ended:
            self._after_end(0, children, found)
        else:
            self._walk(0, (), children, found)
        return found

    def _walk(
        self, node: int, path: tuple[int, ...], children: dict[int, list[tuple[int, int]]], found: dict[int, bytes]
    ) -> None:
        """Masks of a node and of what is below it. The matcher is at the node, before and after, unless it fails there."""
        try:
            mask = found[node] = self._allowed() if path else self._here()
        except GrammarError as error:
            self._stuck[path], found[node] = str(error), bytes(self._size)
            return
        for child, token in children.get(node, ()):
            if not mask[token >> 3] >> (token & 7) & 1:
                continue  # never drawn: nothing below matters
            if token in self._eos:
                self._after_end(child, children, found)
                continue
            self._matcher.consume_token(token)
            self._walk(child, (*path, token), children, found)
            if self._matcher.is_error():
                self._matcher = self._match(path)
            else:
                self._matcher.rollback(1)

    def _after_end(self, node: int, children: dict[int, list[tuple[int, int]]], found: dict[int, bytes]) -> None:
        """Where the end of a sequence does not end the request, more such ends follow."""
        found[node] = self._only_eos()
        for child, token in children.get(node, ()):
            if token in self._eos:
                self._after_end(child, children, found)

    def _here(self) -> bytes:
        if self._root is None:
            self._root = self._allowed()
        return self._root

    def _allowed(self) -> bytes:
        """The matcher's mask. Raises GrammarError."""
        mask: bytes = self._matcher.compute_bitmask()[: self._size]  # it may have a word more
        if self._matcher.is_error():
            raise GrammarError(self._why())
        return mask

    def _match(self, path: Sequence[int]) -> LLMatcher:
        """A matcher after the answer and `path`; one that has failed stays so."""
        matcher = LLMatcher(self._tokenizer, self._grammar, log_level=0)
        if matcher.is_error() or not matcher.consume_tokens([*self._answer, *path]):
            raise GrammarError(_reason(matcher.get_error()))
        return matcher

    def _why(self) -> str:
        return _reason(self._matcher.get_error())

    def _only_eos(self) -> bytes:
        mask = bytearray(self._size)
        for token in self._eos:
            mask[token >> 3] |= 1 << (token & 7)
        return bytes(mask)

    @property
    def _size(self) -> int:
        """Bytes of a mask."""
        return (self._tokenizer.vocab_size + 31) // 32 * 4


def _reason(error: str) -> str:
    """Without the parser's state, which llguidance adds."""
    return error.partition("\n<state>")[0].strip()
