"""Plain answers on record, for a configuration whose drafter is synthetic, and the configurations for before and after."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import httpx
import yaml

from ddtree.deployments.commands.bench import BenchOptions, Run
from ddtree.deployments.commands.client import TIMEOUT, post_chat
from ddtree.deployments.config import read_document

from .service import serving
from .workload import requests


def write_config(source: Path, record: Path | None, out: Path) -> Path:
    """Write `source` with the synthetic drafter's recording at `record`, or for None without the synthetic drafter."""
    document = read_document(source)
    drafter = document["applications"][0]["args"]["drafter"]
    if record is None:
        del drafter["synthetic"]
    else:
        drafter["synthetic"]["record"] = str(record.resolve())
    out.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return out


def replaying(source: Path, folder: Path, prompts: Sequence[str], max_tokens: int, concurrency: Sequence[int]) -> Path:
    """Serve `source` without its synthetic drafter, and record what it answers for `run_bench` at each concurrency. Returns the
    configuration that replays it; that, the recording and the service's output are in `folder`."""
    stem, out = f"{source.stem}-recording", folder / f"{source.stem}-recording.jsonl"
    plain = write_config(source, None, folder / f"{stem}.yaml")
    with serving(plain, folder / f"{stem}.log", drafting=True) as url:
        options = BenchOptions(url, prompts, max_tokens, max(concurrency))
        record(options, max(len(requests(prompts, c)) for c in concurrency), out)
    return write_config(source, out, folder / f"{source.stem}-replay.yaml")


def record(options: BenchOptions, requests: int, out: Path) -> None:
    """Write the plain answer to each prompt, under the names that `run_bench` gives to `requests` requests.

    `options.prompts` are without repetitions; request i sends prompt i modulo their number. Raises ServerError.
    """
    runs = asyncio.run(_ask(options))
    entries = (runs[i % len(runs)].recording(f"bench-{i}") for i in range(requests))
    out.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")


async def _ask(options: BenchOptions) -> list[Run]:
    free = asyncio.Semaphore(options.concurrency)

    async def ask(client: httpx.AsyncClient, prompt: str) -> Run:
        async with free:
            return Run.of(await post_chat(client, options.body(prompt, "plain"), "record"), 0.0)

    async with httpx.AsyncClient(base_url=options.url, timeout=TIMEOUT) as client:
        return await asyncio.gather(*(ask(client, prompt) for prompt in options.prompts))
