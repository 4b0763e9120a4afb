"""What being told the rounds costs: streams of the real service with `ddtree.return_rounds`, which the playground asks for, and
without it.

    python -m benchmarks.told_rounds CONFIG --prompts FILE.jsonl [--streams 1,4] [--turns 6] [--max-tokens 96] [--budget 16]
        [--out FILE.json]

Greedy. Both ways take turns with the same prompts, every other turn in reverse order, in one service; figures are medians of
turns. Clients parse what they get, on the same machine. Beside it the microseconds that a round takes on the host for who asks
for it: in the router `verified`, in the ingress its object and JSON. Who does not ask costs neither.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import torch
from pydantic_core import to_json
from transformers import AutoTokenizer

from ddtree.deployments.api.logprobs import TokenNames
from ddtree.deployments.api.rounds import round_object
from ddtree.deployments.commands.client import chat_body, settings, stream_chat
from ddtree.deployments.verified import verified
from ddtree.kernels import tree_build

from .run import head, numbers, read, where
from .serving.service import serving

LEVELS, CANDIDATES = 15, 64  # of the microbenchmark's draft
SECONDS = dict.fromkeys(("draft", "build", "verify", "accept", "commit"), 0.01)
REPEATS = 500


@dataclass(frozen=True)
class Turn:
    """What one group of streams did."""

    seconds: float
    tokens: int
    rounds: int
    bytes: int  # of all chunks, as JSON


def ask(url: str, prompt: str, budget: int, max_tokens: int, told: bool) -> tuple[int, int, int]:
    """Tokens, rounds and bytes of an answer."""
    body = chat_body(
        [{"role": "user", "content": prompt}],
        budget=budget, prefix_cache=False, max_tokens=max_tokens, temperature=0,
    )  # fmt: skip
    body["ddtree"] |= {"return_rounds": told}
    size, figures = 0, {}
    with httpx.Client(**settings(url)) as client:
        for chunk in stream_chat(client, body):
            size += len(json.dumps(chunk))
            figures = chunk.get("ddtree") or figures
    return len(figures["token_ids"]), figures["rounds"], size


def turn(url: str, prompts: list[str], *how: Any) -> Turn:
    began = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda prompt: ask(url, prompt, *how), prompts))
    return Turn(time.perf_counter() - began, *map(sum, zip(*found, strict=True)))


def compare(url: str, prompts: list[str], streams: int, options: argparse.Namespace) -> dict[str, Any]:
    """Medians of both ways, and their quotient."""
    taken: dict[bool, list[Turn]] = {False: [], True: []}
    for number in range(-1, options.turns):  # the first warms up
        group = [prompts[(streams * number + i) % len(prompts)] for i in range(streams)]
        for told in (False, True) if number % 2 else (True, False):
            one = turn(url, group, options.budget, options.max_tokens, told)
            if number >= 0:
                taken[told].append(one)
    speed = {told: [one.tokens / one.seconds for one in turns] for told, turns in taken.items()}
    rounds = {told: [one.rounds / one.seconds for one in turns] for told, turns in taken.items()}
    return {
        "streams": streams,
        **{
            name: {
                "tokens_per_s": median(speed[told]),
                "rounds_per_s": median(rounds[told]),  # of sequences
                "bytes_per_round": median(one.bytes / one.rounds for one in taken[told]),
            }
            for told, name in ((False, "silent"), (True, "told"))
        },
        "told / silent": {
            "tokens_per_s": median(b / a for a, b in zip(speed[False], speed[True], strict=True)),
            "rounds_per_s": median(b / a for a, b in zip(rounds[False], rounds[True], strict=True)),
        },
        "turns": [round(b / a, 3) for a, b in zip(speed[False], speed[True], strict=True)],  # of tokens_per_s
    }


def microseconds(what: Callable[[], Any]) -> float:
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        what()
        taken.append(time.perf_counter() - began)
    return 1e6 * median(taken)


def on_the_host(budget: int, tokenizer: Any) -> dict[str, float]:
    """Microseconds of one sequence's round with a tree of so many nodes, names of tokens known."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, LEVELS, CANDIDATES, generator=generator).mul_(3).sort(-1, descending=True).values
    ids = torch.stack([torch.randperm(tokenizer.vocab_size, generator=generator)[:CANDIDATES] for _ in range(LEVELS)])
    one = torch.ones(1, dtype=torch.int32)
    tree = tree_build(logits.log_softmax(-1), ids[None].int(), one, one, one * budget, max_budget=budget)

    def make() -> Any:
        return verified(tree, 0, budget, 1, [0, 1], 2, SECONDS)

    told, names = make(), TokenNames(tokenizer)

    def write() -> bytes:
        return to_json(round_object(0, told, names))

    return {"budget": budget, "bytes": len(write()), "router": microseconds(make), "ingress": microseconds(write)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with prompt, question or turns on each line")
    parser.add_argument("--streams", type=numbers, default=[1, 4])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    prompts, _, models = read(options)
    tokenizer = AutoTokenizer.from_pretrained(models.target.model_dir)
    host = [on_the_host(budget, tokenizer) for budget in (options.budget, 63)]
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(options.config, Path(folder) / "service.log", drafting=True) as url,
    ):
        found = [compare(url, prompts, streams, options) for streams in options.streams]
    result = {**head(options.config.stem, "benchmarks.told_rounds"), "microseconds": host, "streams": found}
    for row in found:
        print(json.dumps(row, indent=1))
    print(where(result), host)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
