"""What each thing that a request may ask of its logits costs a round, on a CPU.

    python -m benchmarks.processors [--threads 1] [--sequences 4] [--rounds 12] [--out FILE.json]

SmolLM2 with its drafter, trees of 16 nodes. All variants take turns, several times, so that a machine whose speed drifts treats
them alike; a variant is greedy but for what it names. Medians of the stages that shape a draw: build (where grammars walk the
trees) and verify.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import median

from ddtree.deployments.api.constraints import json_grammar
from ddtree.deployments.requests import EditParams, GenerationRequest, SamplingParams

from .in_process import LocalDrafter, Rounds

PROMPT = "Describe a city by a river, its people and its weather, and give three numbers about it."
SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "numbers": {"type": "array", "items": {"type": "integer"}}},
}
EDITS = {
    "penalties": EditParams(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1),
    "logit_bias of 100 tokens": EditParams(logit_bias=tuple((token, -1.0) for token in range(100, 200))),
    "min_tokens": EditParams(min_tokens=1000),
}
DRAWS = {
    "temperature": SamplingParams(temperature=0.8, seed=1),
    "top_p": SamplingParams(temperature=0.8, top_p=0.9, seed=1),
    "top_k": SamplingParams(temperature=0.8, top_k=40, seed=1),
    "min_p": SamplingParams(temperature=0.8, min_p=0.05, seed=1),
}
TURNS = 5


def variants(plain: GenerationRequest) -> dict[str, GenerationRequest]:
    return {
        "greedy": plain,
        **{name: replace(plain, sampling=sampling) for name, sampling in DRAWS.items()},
        **{name: replace(plain, sampling=SamplingParams(edits=edits)) for name, edits in EDITS.items()},
        "logprobs: 5": replace(plain, logprobs=5),
        "a JSON schema": replace(plain, grammar=json_grammar(SCHEMA)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12, help="of each variant in each turn")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    local = Rounds(options.threads, LocalDrafter)
    plain = GenerationRequest("", local.chat(PROMPT), 10_000, (), budget=16)
    taken: dict[str, list[tuple[float, float]]] = {}
    for turn in range(TURNS):
        for name, request in variants(plain).items():
            for i in range(options.sequences):
                local.add(replace(request, request_id=f"{turn} {name} {i}"))
            local.loop.run()  # the prompts
            before = dict(local.loop.metrics.stage_seconds)
            for _ in range(options.rounds):
                local.loop.run()
            after = local.loop.metrics.stage_seconds
            build, verify = ((after[stage] - before[stage]) / options.rounds for stage in ("build", "verify"))
            taken.setdefault(name, []).append((build * 1e3, verify * 1e3))
            for sequence in local.scheduler.running:
                sequence.cancelled = True
            local.loop.drop_cancelled()
    table = {
        name: {"build": median(b for b, _ in each), "verify": median(v for _, v in each)}
        for name, each in taken.items()
    }
    base = table["greedy"]
    before = f"{base['build']:.1f} build, {base['verify']:.1f} verify"
    print(f"{options.sequences} sequences of 17 rows; ms a round more than greedy ({before})")
    for name, row in table.items():
        print(f"{name:26} build {row['build'] - base['build']:+6.2f}  verify {row['verify'] - base['verify']:+7.2f}")
    if options.out:
        options.out.write_text(json.dumps({"sequences": options.sequences, "ms": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
