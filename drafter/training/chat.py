"""A chat format read off a tokenizer's own template, and the choice of a mask token. Knows no model weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_USER, _ANSWER, _AGAIN = "⟦first user text⟧", "⟦answer text⟧", "⟦second user text⟧"


@dataclass(frozen=True)
class ChatFormat:
    """The text around turns. `opening + user + assistant` is a prompt; `… + answer + turn + user + assistant` goes on."""

    opening: str  # everything before the first user text: also what a model continues to invent one (arXiv 2406.08464)
    assistant: str  # from the end of a user text to the begin of the answer
    turn: (
        str | None
    )  # from the end of an answer to the begin of the next user text; None: the template has no second turn

    @classmethod
    def of(cls, tokenizer: Any) -> ChatFormat:
        """Raises ValueError where the tokenizer has no chat template or the template hides the user's text."""
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the target's tokenizer has no chat template: add chat_template.jinja to its directory")

        def render(*texts: str, answer_next: bool) -> str:
            roles = ("user", "assistant", "user")
            turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
            return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=answer_next))

        opening, found, assistant = render(_USER, answer_next=True).partition(_USER)
        if not found:
            raise ValueError("the target's chat template does not show the user's text as it is")
        try:
            turn = render(_USER, _ANSWER, _AGAIN, answer_next=True).partition(_ANSWER)[2].partition(_AGAIN)
        except Exception:  # templates raise what they like where they know no second turn
            return cls(opening, assistant, None)
        return cls(opening, assistant, turn[0] if turn[1] else None)

    def prompt(self, user: str) -> str:
        """One user text as the model meets it."""
        return self.opening + user + self.assistant


def load_tokenizer(target_dir: Path) -> Any:
    """The target's tokenizer. Its encodings never get special tokens added: the chat format already has them."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(target_dir))


def encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, nothing added."""
    return list(tokenizer(texts, add_special_tokens=False)["input_ids"]) if texts else []


def stop_tokens(target_dir: Path, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer: those of generation_config.json and config.json, and the tokenizer's own."""
    found: set[int] = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    for name in ("generation_config.json", "config.json"):
        path = target_dir / name
        given = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        found |= {int(i) for i in (given if isinstance(given, list) else [given]) if i is not None}
    if not found:
        raise ValueError("the target names no end-of-text token: add eos_token_id to its generation_config.json")
    return tuple(sorted(found))


def choose_mask_token(tokenizer: Any, vocab_size: int) -> int:
    """An id that real text does not use: the first row past the tokenizer's, else its last idle special token."""
    if vocab_size > len(tokenizer):
        return len(tokenizer)
    named = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    template = tokenizer.chat_template or ""
    special = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special and i < vocab_size}
    idle = [i for i, text in special.items() if i not in named and text not in template]
    if not idle:
        raise ValueError("the target's tokenizer has no unused special token: give mask_token_id")
    return max(idle)
