"""A peer's side of a job: prompts to token ids, groups through the engine under a clock. Knows no engine."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ddtree.deployments.commands.machine import installed

from ..lossless import render
from .peers import Job
from .workload import requests

Ids = list[int]
Engine = Callable[[list[Ids]], list[Ids]]  # prompts of one group, which run together, to their answers


def run(make: Callable[[Job, Sequence[Ids], str], Engine], packages: Sequence[str]) -> None:
    """Do the job that the command line names. What is done is written after each concurrency.

    make: the engine for a job, all its prompts and the setting that the command line names.
    """
    job_file, out, setting = sys.argv[1:]
    job = Job(**json.loads(Path(job_file).read_text(encoding="utf-8")))
    tokenizer = AutoTokenizer.from_pretrained(job.model_dir)
    ids = {prompt: render(tokenizer, prompt)[0].tolist() for prompt in job.prompts}
    begin = time.perf_counter()
    engine = make(job, list(ids.values()), setting)
    result: dict[str, Any] = {
        "versions": {package: installed(package) for package in packages},
        "start_seconds": time.perf_counter() - begin,
        "runs": {},
    }
    for concurrency in job.concurrency:
        prompts = [ids[prompt] for prompt in requests(job.prompts, concurrency)]
        groups = [prompts[i : i + concurrency] for i in range(0, len(prompts), concurrency)]
        engine(groups[0])  # warms up, and compiles where there is something to compile
        begin = time.perf_counter()
        answers = [_ended(answer, job) for group in groups for answer in engine(group)]
        seconds = time.perf_counter() - begin
        tokens = sum(map(len, answers))
        run = {"tokens_per_s": tokens / seconds, "tokens": tokens, "seconds": seconds, "token_ids": answers}
        result["runs"][concurrency] = run
        Path(out).write_text(json.dumps(result), encoding="utf-8")


def _ended(answer: Ids, job: Job) -> Ids:
    """The answer up to its first stop token, which counts, as in the service."""
    end = next((i + 1 for i, token in enumerate(answer) if token in job.stop_token_ids), len(answer))
    return answer[:end]
