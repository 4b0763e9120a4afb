"""How much of the target's noise should rank the candidates? Tokens per round by share, temperature and budget, on a CPU.

    python -m benchmarks.shared_noise --prompts FILE.jsonl [--temperature 1] [--tokens 96] [--out FILE.json]

SmolLM2 with its shipped drafter answers the prompts in this process. At every round the drafter's candidates are kept, and what
the target then drew is known. So trees of all shares and budgets are built from the same candidates and walked along the same
answers: exact, and without running the target again.
"""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import torch
from rich.progress import Progress

from ddtree.deployments.commands.prompts import read_prompts
from ddtree.deployments.requests import GenerationRequest, SamplingParams
from ddtree.drafter.drafter import Candidates, Drafter, DraftItem
from ddtree.kernels import share_noise, tree_accept, tree_build
from ddtree.verifier.batch import VerifyResult

from .in_process import LocalDrafter, Rounds

SHARES = (0.0, 0.3, 0.5, 0.65, 0.8, 1.0)
BUDGETS = (8, 16, 32, 63)


@dataclass(frozen=True)
class Drafted:
    """What the drafter said of a sequence before the target drew."""

    sequence: str
    position: int  # of the root
    candidates: Candidates  # of one row


class RecordingDrafter(LocalDrafter):
    """Keeps its candidates."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.drafted: list[Drafted] = []

    def start(self, items: list[DraftItem], features: VerifyResult | None) -> None:
        super().start(items, features)
        asked = [item for item in items if item.bonus is not None]
        found = self.result()
        for item, logprobs, ids in zip(asked, found.logprobs, found.ids, strict=True):
            self.drafted.append(Drafted(item.sequence, item.position, Candidates(logprobs, ids)))


@dataclass
class Played:
    """Answers, and what was drafted on the way."""

    requests: dict[str, GenerationRequest]
    answers: dict[str, list[int]]
    drafted: list[Drafted]


def play(prompts: list[str], temperature: float, tokens: int, threads: int) -> Played:
    local = Rounds(threads, RecordingDrafter)
    requests = {}
    for i, prompt in enumerate(prompts):
        name = f"prompt {i}"
        sampling = SamplingParams(temperature=temperature, seed=crc32(name.encode()))
        requests[name] = GenerationRequest(name, local.chat(prompt), tokens, local.stop, sampling, budget=16)
        local.add(requests[name])
    with Progress() as progress:
        task = progress.add_task("rounds", total=len(prompts) * tokens)
        while local.loop.run():
            progress.update(task, completed=sum(map(len, local.answers.values())))
    return Played(requests, local.answers, local.drafter.drafted)


def tokens_per_round(played: Played, share: float, budget: int) -> float:
    """Over the rounds whose answer goes on past the drafter's last position."""
    rows: list[tuple[Drafted, list[int]]] = []
    for drafted in played.drafted:
        whole = [*played.requests[drafted.sequence].prompt_ids, *played.answers[drafted.sequence]]
        coming = whole[drafted.position + 1 :][: len(drafted.candidates.ids)]
        if len(coming) == len(drafted.candidates.ids):
            rows.append((drafted, coming))
    logprobs = torch.stack([drafted.candidates.logprobs for drafted, _ in rows])
    ids = torch.stack([drafted.candidates.ids for drafted, _ in rows])
    draws = [played.requests[drafted.sequence].sampling for drafted, _ in rows]
    position = torch.tensor([drafted.position for drafted, _ in rows], dtype=torch.int32)
    scale = torch.tensor([share * p.temperature for p in draws])
    logprobs, ids = share_noise(logprobs, ids, torch.tensor([p.seed for p in draws]), position, scale)
    tree = tree_build(logprobs, ids, position, position, torch.full_like(position, budget), max_budget=budget)
    drawn = torch.tensor([[*coming, -1] for _, coming in rows], dtype=torch.int32)
    y = drawn.gather(1, tree.depth.long())  # at a node that is not on the answer's path nobody asks
    return tree_accept(y, tree).n_accepted.float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    played = play(read_prompts(options.prompts), options.temperature, options.tokens, options.threads)
    table = {budget: {share: tokens_per_round(played, share, budget) for share in SHARES} for budget in BUDGETS}
    print(f"temperature {options.temperature}, {len(played.drafted)} rounds; tokens per round by share of the noise")
    print("budget", *(f"{share:6.2f}" for share in SHARES))
    for budget, row in table.items():
        print(f"{budget:6}", *(f"{value:6.3f}" for value in row.values()))
    if options.out:
        facts = {"temperature": options.temperature, "prompts": len(played.requests), "rounds": len(played.drafted)}
        machine = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        options.out.write_text(json.dumps(facts | machine | {"tokens_per_round": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
