"""Stage 1: prompts for the target to answer, as token ids. Knows no model weights.

Every prompt has a group: variants of one source share it, so that a validation split never separates them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ddtree.drafter.training import wordings
from ddtree.drafter.training.chat import ChatFormat, encode, load_tokenizer
from ddtree.drafter.training.options import Report, TrainOptions
from ddtree.drafter.training.ragged import Tokens, pack, save_arrays, token_dtype, unpack
from ddtree.drafter.training.sources import harvest


@dataclass(frozen=True)
class PromptSet:
    """Prompts and the pieces of chat that build more of them; every entry is an array of token ids."""

    prompts: list[Tokens]
    kinds: list[str]  # of each prompt: question, given, code, prose or task
    groups: list[int]
    opening: Tokens  # what the target continues to invent a user text
    assistant: Tokens
    turn: Tokens | None
    wraps: list[Tokens]  # an opening and the words before a piece of text
    follows: list[Tokens]  # next user turns

    def save(self, path: Path, dtype: type) -> None:
        turn = [] if self.turn is None else [self.turn]
        lists = {"ids": self.prompts, "wraps": self.wraps, "follows": self.follows}
        lists["pieces"] = [self.opening, self.assistant, *turn]
        arrays = {}
        for name, rows in lists.items():
            arrays[name], arrays[name + "_off"] = pack(rows, dtype)
        save_arrays(path, kind=np.array(self.kinds, "U16"), group=np.array(self.groups, np.int64), **arrays)

    @classmethod
    def load(cls, path: Path) -> PromptSet:
        with np.load(path) as z:
            rows = {name: unpack(z[name], z[name + "_off"]) for name in ("ids", "wraps", "follows", "pieces")}
            opening, assistant, *turn = rows["pieces"]
            kinds, groups = z["kind"].tolist(), z["group"].tolist()
        chat = (opening, assistant, turn[0] if turn else None)
        return cls(rows["ids"], kinds, groups, *chat, rows["wraps"], rows["follows"])


def read_prompts(path: Path) -> Iterator[tuple[str, str]]:
    """`(field, text)` of each line of a JSONL file: its question, prompt, or first of turns.

    Raises ValueError with file and line where a line has none of them.
    """
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        row = json.loads(line)
        if row.get("turns"):
            yield "turns", str(row["turns"][0])
        elif name := next((n for n in ("question", "prompt") if row.get(n)), None):
            yield name, str(row[name])
        else:
            raise ValueError(f"{path}:{number}: a prompt needs one of the keys prompt, question, turns")


def as_user_text(field: str, text: str) -> str:
    """A held-out text as a user would send it: code is to be completed, all else stands for itself."""
    return wordings.STUB[0].format(c=text) if field == "prompt" and "def " in text else text


def make_prompts(options: TrainOptions, vocab_size: int, report: Report) -> PromptSet:
    """Builds the set from JSONL files, Python files and the project's own wordings; held-out texts are left out."""
    tokenizer, rng = load_tokenizer(options.target_dir), random.Random(options.seed)
    chat = ChatFormat.of(tokenizer)
    report("prompts", 0.1, "reading prompt files")
    held_out = {_normal(text) for path in options.evaluate for _, text in read_prompts(path)}
    texts = list(_given(options.prompts, held_out, rng))
    report("prompts", 0.2, f"{len(texts)} prompts given; reading Python files")
    found = harvest(options.source_dirs(), rng, options.functions, options.passages, options.harvest_seconds)
    report("prompts", 0.6, f"{len(found.functions)} functions, {len(found.passages)} passages; encoding")
    for fn in found.functions:
        variants = [("code", rng.choice(wordings.STUB).format(c=fn.stub))]
        if rng.random() < 0.6:
            words = rng.choice(wordings.FUNCTION)
            variants.append(("code", words.format(n=fn.name, a=fn.arguments, d=fn.summary, s=fn.source)))
        texts.append(variants)
    texts += [[("prose", rng.choice(wordings.PASSAGE).format(t=t))] for t in found.passages]
    texts += [
        [("task", task.format(t=topic)) for task in rng.sample(wordings.TASK, len(wordings.TASK))]
        for topic in wordings.TOPIC
    ]
    flat = [(kind, group, chat.prompt(text)) for group, row in enumerate(texts) for kind, text in row]
    ids = encode(tokenizer, [text for _, _, text in flat])
    keep = [i for i, row in enumerate(ids) if len(row) <= options.longest_prompt]
    rng.shuffle(keep)

    def tokens(text: str) -> Tokens:
        return np.asarray(encode(tokenizer, [text])[0], token_dtype(vocab_size))

    made = PromptSet(
        prompts=[np.asarray(ids[i], token_dtype(vocab_size)) for i in keep],
        kinds=[flat[i][0] for i in keep],
        groups=[flat[i][1] for i in keep],
        opening=tokens(chat.opening),
        assistant=tokens(chat.assistant),
        turn=None if chat.turn is None else tokens(chat.turn),
        wraps=[tokens(chat.opening + words) for words in wordings.WRAP],
        follows=[tokens(words) for words in wordings.FOLLOW],
    )
    counts = {kind: made.kinds.count(kind) for kind in sorted(set(made.kinds))}
    report("prompts", 1.0, f"{len(keep)} prompts: " + ", ".join(f"{n} {kind}" for kind, n in counts.items()))
    return made


def _given(paths: Iterable[Path], held_out: set[str], rng: random.Random) -> Iterator[list[tuple[str, str]]]:
    for path in paths:
        for field, text in read_prompts(path):
            if _normal(text) in held_out:
                continue
            if field == "question":
                yield [("question", words.format(q=text)) for words in rng.sample(wordings.QUESTION, 3)]
            else:
                yield [("given", as_user_text(field, text))]


def _normal(text: str) -> str:
    return " ".join(text.lower().split())
