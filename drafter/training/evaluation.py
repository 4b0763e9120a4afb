"""A finished drafter measured on prompts: the target answers each once, then rounds are walked. Knows no training and no files
but the two models'."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ddtree.drafter.checkpoint import load_published
from ddtree.drafter.config import DrafterInfo
from ddtree.drafter.path_head import PathHead
from ddtree.drafter.training.acceptance import Ranking, Sample, tally
from ddtree.drafter.training.chat import ChatFormat, encode, load_tokenizer, stop_tokens
from ddtree.drafter.training.decoder import Decoder, Job
from ddtree.drafter.training.options import Report, quiet
from ddtree.drafter.training.tallies import UNCUT, Cells, Tally, total
from ddtree.drafter.training.target import Target
from ddtree.kernels.noise import KeyedNoise

SLOTS = {"cpu": 8, "cuda": 256}  # answers generated at once


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """What to measure, and how."""

    target_dir: Path  # Hugging Face directory
    drafter_dir: Path  # DFlash checkpoint made for it
    budgets: tuple[int, ...]  # nodes of the trees besides the root
    tokens: int  # of an answer, within which rounds begin
    temperature: float = 0.0  # 0: greedy
    noise_share: float = 0.0  # of the target's noise that candidates are ranked by; 0: none
    seed: int = 0  # prompt i of a set draws with seed + i
    top_k: int = 32  # candidates per depth
    path_head: bool = True  # by the checkpoint's, where it has one
    preceding: int = 0  # tokens of the set's other prompts that come before each, in the user's text
    context: int = 2048  # tokens of the longest prompt with its answer; longer ones are left out
    cells: Cells = UNCUT
    device: str = "cpu"
    dtype: torch.dtype = torch.float32  # of both models


@dataclass(frozen=True)
class DataSet:
    """The result of one set of prompts."""

    prompts: int  # measured
    left_out: int  # too long, or answered by one token
    columns: dict[str, Tally]  # "chain" and each budget


@dataclass(frozen=True)
class Evaluation:
    """The result of all."""

    sets: dict[str, DataSet]
    answer_seconds: float  # of the target
    round_seconds: float

    @property
    def overall(self) -> DataSet:
        """All sets as one, every round counting alike."""
        sets = self.sets.values()
        return DataSet(sum(s.prompts for s in sets), sum(s.left_out for s in sets), total(s.columns for s in sets))


def evaluate(options: EvaluationOptions, prompts: Mapping[str, Sequence[str]], report: Report = quiet) -> Evaluation:
    """Measures a drafter offline: exact for the answers of this process up to rounding, see acceptance.py.

    Args:
        prompts: user texts by the name of their set.
        report: called with (stage, fraction done, one line) while the target answers and after the rounds of each answer.
    Raises:
        ValueError: a target or drafter that cannot be measured, a set none of whose prompts fits, or no answer for a round.
    """
    tokenizer = load_tokenizer(options.target_dir)
    jobs, names = _jobs(options, prompts, tokenizer)
    began = time.monotonic()
    report("answers", 0.0, "loading the target")
    target = Target(options.target_dir, torch.device(options.device), options.dtype)
    model = load_published(options.drafter_dir, dtype=target.dtype, device=target.device)
    samples = _answers(options, target, stop_tokens(options.target_dir, tokenizer), jobs, names, report)
    answered = time.monotonic()
    info = DrafterInfo.read(options.drafter_dir)
    head = PathHead.load(info, dtype=target.dtype, device=target.device) if options.path_head else None
    ranking = Ranking(options.top_k, options.noise_share * options.temperature, head)
    columns = ("chain", *map(str, options.budgets))
    counts = {name: {c: Tally.empty(model.config.horizon, options.cells) for c in columns} for name in prompts}
    measured = dict.fromkeys(prompts, 0)
    for i, sample in enumerate(samples):
        found = tally(model, target, sample, options.budgets, options.tokens, ranking=ranking, cells=options.cells)
        if found:
            counts[sample.name] = total((counts[sample.name], found))
            measured[sample.name] += 1
        report("rounds", (i + 1) / len(samples), f"{i + 1} of {len(samples)} answers, {sample.name}")
    if not any(measured.values()):
        raise ValueError("no answer is long enough for a round: the target ends each after one token")
    sets = {name: DataSet(n, len(prompts[name]) - n, counts[name]) for name, n in measured.items()}
    return Evaluation(sets, answered - began, time.monotonic() - answered)


def _jobs(
    options: EvaluationOptions, prompts: Mapping[str, Sequence[str]], tokenizer: object
) -> tuple[list[Job], list[str]]:
    """What is to be answered, and of which set each is. Answers go on for a block, so that the last rounds are whole."""
    chat, jobs, names = ChatFormat.of(tokenizer), list[Job](), list[str]()
    more = options.tokens + DrafterInfo.read(options.drafter_dir).block_size
    for name, texts in prompts.items():
        encoded = encode(tokenizer, [chat.prompt(text) for text in texts])
        if options.preceding:
            encoded = _late(
                encode(tokenizer, [chat.opening, *(f"{text}\n\n" for text in texts)]), encoded, options.preceding
            )
        fitting = [(i, ids) for i, ids in enumerate(encoded) if len(ids) + more <= options.context]
        if not fitting:
            raise ValueError(f"{name}: no prompt fits, with {more} tokens after it, into {options.context} tokens")
        for i, ids in fitting:
            jobs.append(Job(len(jobs), np.asarray(ids), options.temperature, more, options.seed + i))
            names.append(name)
    return jobs, names


def _late(parts: list[list[int]], prompts: list[list[int]], count: int) -> list[list[int]]:
    """Prompts with `count` tokens after their opening of the texts that follow, again from the first after the last.

    Args:
        parts: the opening, and each prompt's text.
        prompts: that begin with it.
    """
    opening, *texts = parts
    late = []
    for i, ids in enumerate(prompts):
        others = texts[i + 1 :] + texts[:i] or texts
        before = itertools.islice(itertools.chain.from_iterable(itertools.cycle(others)), count)
        late.append([*opening, *before, *ids[len(opening) :]])
    return late


def _answers(
    options: EvaluationOptions, target: Target, stop: tuple[int, ...], jobs: list[Job], names: list[str], report: Report
) -> list[Sample]:
    """The target's answers, in the order in which they are finished."""
    slots = min(SLOTS[target.device.type], len(jobs))
    size = max(len(job.prompt) + job.max_new for job in jobs) + 1
    noise = KeyedNoise(target.head.shape[0], target.device) if options.temperature > 0 else None
    decoder = Decoder(target, stop, slots, size, options.seed, keyed_noise=noise)
    samples: list[Sample] = []

    def look(tokens: int) -> None:
        done = (len(samples) + tokens / jobs[0].max_new) / len(jobs)
        report("answers", done, f"{len(samples)} of {len(jobs)} finished")

    for answer in decoder.generate(iter(jobs), deadline=float("inf"), wait_for_all=True, look=look):
        job = answer.job
        samples.append(Sample(names[job.key], answer.tokens, len(job.prompt), job.seed))
    look(0)
    return samples
