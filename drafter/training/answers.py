"""Stage 2: the target's own answers, in shards, so that a killed run keeps what it has. Knows no training.

First the target invents user texts (Magpie, arXiv 2406.08464), then it answers those and the prompts of stage 1, then texts built
on its answers (next turns, pieces to work on), then prompts once more with other noise, until the time is used.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ddtree.drafter.training.decoder import Decoder, Job
from ddtree.drafter.training.options import Report, TrainOptions
from ddtree.drafter.training.prompts import PromptSet
from ddtree.drafter.training.ragged import Tokens, pack, save_arrays, unpack
from ddtree.drafter.training.ranks import ALONE, Ranks

TEMPERATURES = (0.0, 0.0, 0.7, 1.0, 1.0)  # drawn evenly: 40 % greedy
INVENTED_SHARE = 0.2  # of the time, at most
INVENTED_MAX, INVENTED_TOKENS = 60_000, 160
EARLIER_TRIES = 128  # conversations looked at for what comes before a prompt
SHARD_SECONDS = 20.0
TICK_SECONDS = 1.0


@dataclass(frozen=True)
class Source:
    """Where a job came from: becomes columns of its answer."""

    kind: str
    group: int
    key: int


@dataclass
class Answers:
    """Columns of equal length, one entry per answer."""

    tokens: list[Tokens] = field(default_factory=list)  # prompt and answer
    prompt_length: list[int] = field(default_factory=list)
    temperature: list[float] = field(default_factory=list)
    group: list[int] = field(default_factory=list)  # answers with the same source share it
    kind: list[str] = field(default_factory=list)
    key: list[int] = field(default_factory=list)  # index of the first-round prompt, -1 for later ones

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, tokens: Tokens, prompt_length: int, temperature: float, source: Source) -> None:
        """One more entry."""
        self.tokens.append(tokens)
        self.prompt_length.append(prompt_length)
        self.temperature.append(temperature)
        self.kind.append(source.kind)
        self.group.append(source.group)
        self.key.append(source.key)

    @property
    def new_tokens(self) -> int:
        return sum(map(len, self.tokens)) - sum(self.prompt_length)


class AnswerStore:
    """A folder of shards with the generation seconds each of them took. Every process of a run adds its own."""

    def __init__(self, folder: Path, dtype: type, rank: int = 0) -> None:
        self.folder, self.dtype = folder, dtype
        self.own = f"rank{rank}-" if rank else ""  # before the names of this process's files
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def finished(self) -> bool:
        return (self.folder / "finished").exists()

    def finish(self) -> None:
        (self.folder / "finished").touch()

    def _shards(self, begin: str = "*") -> list[Path]:
        return sorted(p for p in self.folder.glob(f"{begin}shard-*.npz") if "partial" not in p.name)

    def append(self, answers: Answers, seconds: float) -> None:
        """One more shard; whole or not there."""
        ids, offsets = pack(answers.tokens, self.dtype)
        path = self.folder / f"{self.own}shard-{len(self._shards(self.own)):04d}.npz"
        columns = {
            "prompt_length": np.array(answers.prompt_length, np.int64),
            "temperature": np.array(answers.temperature, np.float32),
            "group": np.array(answers.group, np.int64),
            "kind": np.array(answers.kind, "U16"),
            "key": np.array(answers.key, np.int64),
        }
        save_arrays(path, ids=ids, offsets=offsets, seconds=np.float64(seconds), **columns)

    def load(self, *, mine: bool = False) -> tuple[Answers, float]:
        """Everything so far, or what is of this process, and the seconds it took."""
        out, seconds = Answers(), 0.0
        for path in self._shards(self.own if mine else "*"):
            with np.load(path) as z:
                out.tokens += unpack(z["ids"], z["offsets"])
                for name in ("prompt_length", "temperature", "group", "kind", "key"):
                    getattr(out, name).extend(z[name].tolist())
                seconds += float(z["seconds"])
        return out, seconds


def make_answers(
    options: TrainOptions,
    prompts: PromptSet,
    decoder: Decoder,
    store: AnswerStore,
    report: Report,
    ranks: Ranks = ALONE,
) -> None:
    """Fills the store until `options.generation` seconds are used, counting those of earlier runs. `ranks`: share the
    prompts."""
    so_far, spent = store.load(mine=True)
    total, begun = options.generation, time.time()
    invented, inventing = _invented(options, prompts, decoder, store, total * INVENTED_SHARE, report)
    begun, spent = time.time(), spent + inventing
    jobs = _Jobs(options, prompts, invented, so_far, ranks)
    fresh, last, tokens, count = Answers(), time.time(), so_far.new_tokens, len(so_far)
    told = 0.0
    try:
        for answer in decoder.generate(iter(jobs), begun + total - spent):
            prompt_length, source = len(answer.job.prompt), jobs.sources.pop(answer.job.key)
            row: Tokens = answer.tokens.astype(store.dtype)
            fresh.add(row, prompt_length, answer.job.temperature, source)
            jobs.answered(row, prompt_length, source)
            tokens, count, now = tokens + len(row) - prompt_length, count + 1, time.time()
            if now - last > SHARD_SECONDS:
                store.append(fresh, now - last)
                fresh, last = Answers(), now
            if now - told > TICK_SECONDS:
                told, done = now, (spent + now - begun) / total
                report("answers", min(1.0, done), f"{count} answers, {tokens / 1e6:.1f}M new tokens")
    finally:
        store.append(fresh, time.time() - last)


class _Jobs:
    """The endless order of work; `sources` says of each open job where it came from."""

    def __init__(
        self,
        options: TrainOptions,
        prompts: PromptSet,
        invented: list[Tokens],
        so_far: Answers,
        ranks: Ranks = ALONE,
    ) -> None:
        self.options, self.prompts = options, prompts
        self.rng = np.random.default_rng([options.seed, len(so_far), ranks.rank])
        base = max(prompts.groups, default=-1) + 1
        self.first = list(zip(prompts.kinds, prompts.groups, prompts.prompts, strict=True))[ranks.part]
        self.first += [
            ("invented", base + i, np.concatenate([prompts.opening, text, prompts.assistant]))
            for i, text in enumerate(invented)
        ]
        self.finished_keys = {key for key in so_far.key if key >= 0}
        self.pool = [
            (tokens, plen, kind, group)
            for tokens, plen, kind, group in zip(
                so_far.tokens, so_far.prompt_length, so_far.kind, so_far.group, strict=True
            )
        ]
        self.sources: dict[int, Source] = {}
        self.count = 0

    def answered(self, tokens: Tokens, prompt_length: int, source: Source) -> None:
        """An answer that later jobs may build on."""
        self.pool.append((tokens, prompt_length, source.kind, source.group))

    def __iter__(self) -> Iterator[Job]:
        order = np.random.default_rng(self.options.seed).permutation(len(self.first))
        for i in (int(i) for i in order if int(i) not in self.finished_keys):
            kind, group, ids = self.first[i]
            yield self._job(ids, Source(kind, group, i))
        while self.first:
            for n, i in enumerate(self.rng.permutation(len(self.pool))[: max(1, len(self.pool) // 2)]):
                ids, group = self._built(n, int(i))
                if len(ids) <= self.options.longest_prompt:
                    yield self._job(self._perhaps_late(ids, group), Source("built", group, -1))
            for i in self.rng.permutation(len(self.first))[: max(1, len(self.first) // 4)]:
                kind, group, ids = self.first[int(i)]
                late = self._perhaps_late(ids, group)
                yield self._job(late, Source(kind, group, -1), float(self.rng.choice([0.7, 1.0])))

    def _job(self, ids: Tokens, source: Source, temperature: float | None = None) -> Job:
        self.count += 1
        self.sources[self.count] = source
        drawn = float(self.rng.choice(TEMPERATURES)) if temperature is None else temperature
        return Job(self.count, ids, drawn, self.options.max_new)

    def _perhaps_late(self, ids: Tokens, group: int) -> Tokens:
        """A prompt, in `long_share` of the cases after earlier conversations. Those of validation and of training do not mix."""
        p, o = self.prompts, self.options
        opening = len(p.opening)
        if p.turn is None or self.rng.random() >= o.long_share or ids[:opening].tolist() != p.opening.tolist():
            return ids
        room = self.rng.uniform(0, o.longest_prompt - len(ids))
        parts = [ids[opening:]]
        for i in dict.fromkeys(self.rng.integers(len(self.pool), size=EARLIER_TRIES).tolist()):
            tokens, _, _, other = self.pool[i]
            same = (other % o.validation_every == 0) == (group % o.validation_every == 0)
            more = len(tokens) - opening + len(p.turn)
            if same and more <= room and tokens[:opening].tolist() == p.opening.tolist():
                parts += [p.turn, tokens[opening:]]
                room -= more
        return np.concatenate([p.opening, *reversed(parts)])

    def _built(self, n: int, i: int) -> tuple[Tokens, int]:
        """A next turn, or a piece of the answer to work on."""
        p, (tokens, plen, kind, group) = self.prompts, self.pool[i]
        if p.turn is None or (n % 2 and kind != "code"):
            piece = tokens[plen:][: int(self.rng.integers(30, 300))]
            return np.concatenate([p.wraps[n // 2 % len(p.wraps)], piece, p.assistant]), group
        follow = p.follows[n // 2 % len(p.follows)]
        return np.concatenate([tokens, p.turn, follow, p.assistant]), group


def _invented(
    options: TrainOptions, prompts: PromptSet, decoder: Decoder, store: AnswerStore, seconds: float, report: Report
) -> tuple[list[Tokens], float]:
    """User texts the target makes up after its template's opening, and the seconds that took now or in an earlier run."""
    path = store.folder / f"{store.own}invented.npz"
    if path.exists():
        with np.load(path) as z:
            return unpack(z["ids"], z["offsets"]), float(z["seconds"])
    begun, stop, out = time.time(), set(decoder.stop.tolist()), list[Tokens]()
    report("answers", 0.0, "the target invents prompts")
    jobs = (Job(i, prompts.opening, (0.8, 1.0)[i % 2], INVENTED_TOKENS) for i in range(INVENTED_MAX))
    for answer in decoder.generate(jobs, begun + seconds):
        text = answer.tokens[len(prompts.opening) : -1]
        if int(answer.tokens[-1]) in stop and len(text) > 4:
            out.append(text)
    out = list({text.tobytes(): text for text in out}.values())
    ids, offsets = pack(out, store.dtype)
    spent = time.time() - begun
    save_arrays(path, ids=ids, offsets=offsets, seconds=np.float64(spent))
    report("answers", spent / max(options.generation, 1e-9), f"{len(out)} prompts invented")
    return out, spent


def summary(answers: Answers) -> str:
    """How many of what kind, in one line."""
    kinds = ", ".join(f"{answers.kind.count(kind):,} {kind}" for kind in sorted(set(answers.kind)))
    total = sum(map(len, answers.tokens))
    return (
        f"{len(answers):,} answers ({kinds}), {answers.new_tokens / 1e6:.2f}M new tokens, "
        f"{total / 1e6:.2f}M with prompts"
    )
