"""Is the output the target's own? Every prompt plain, speculative and through transformers' own `generate`.

    python benchmarks/lossless.py --url http://127.0.0.1:8000 --prompts tests/data/prompts.jsonl --model DIR --json OUT

Compares token ids. Where they differ (bf16 does, at near-ties), both tokens are scored at the shared prefix by the target in fp32
and in bf16, so that a reader sees how near the tie was. `--model` is the target's Hugging Face directory; without it the
comparison with transformers is left out. Sampling has no counterpart in transformers (its noise is not keyed), so with a
temperature only plain and speculative are compared.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

from ddtree.deployments.commands.machine import Machine
from ddtree.deployments.commands.prompts import read_prompts


@dataclass(frozen=True)
class Difference:
    """Where two outputs of one prompt part."""

    prompt: str
    between: str
    position: int  # tokens of the answer that are equal
    tokens: tuple[int | None, int | None]
    gap: dict[str, float]  # by dtype: logit of the first token less that of the second, at the shared prefix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--limit", type=int, help="prompts of each file")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--model", type=Path)
    parser.add_argument(
        "--dtype", default="float32", help="of transformers' generate; the server's own, to compare like with like"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    prompts = [prompt for path in options.prompts for prompt in read_prompts(path, options.limit)]
    outputs = {
        name: ask_all(options, prompts, budget) for name, budget in (("plain", 0), ("speculative", options.budget))
    }
    pairs = [("speculative", "plain")]
    tokenizer = model = None
    if options.model:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        if options.temperature == 0:
            model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).eval()
            outputs["transformers"] = [
                generate(model, tokenizer, p, options.max_tokens) for p in track(prompts, "transformers")
            ]
            pairs += [("plain", "transformers"), ("speculative", "transformers")]
    differences = [d for pair in pairs for d in differing(prompts, outputs, pair)]
    if options.model and options.temperature == 0:
        differences = scored(options.model, tokenizer, prompts, outputs, differences)
    result = {
        "prompts": len(prompts),
        "tokens": sum(len(ids) for ids in outputs["plain"]),
        "identical": {
            f"{a} = {b}": sum(x == y for x, y in zip(outputs[a], outputs[b], strict=True)) / len(prompts)
            for a, b in pairs
        },
        "differences": [asdict(d) for d in differences],
        "settings": {k: str(v) for k, v in vars(options).items()},
        "machine": asdict(Machine.read()),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    print(json.dumps({k: result[k] for k in ("prompts", "tokens", "identical")}, indent=1))
    for d in differences:
        print(f"{d.between}: part after {d.position} tokens, {d.tokens}, logit gap {d.gap}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def ask_all(options: argparse.Namespace, prompts: list[str], budget: int) -> list[list[int]]:
    """The server's token ids for every prompt."""

    def ask(job: tuple[int, str]) -> list[int]:
        seed, prompt = job
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "seed": seed,
            "ddtree": {"budget": budget, "return_token_ids": True},
        }
        answer = httpx.post(f"{options.url}/v1/chat/completions", json=body, timeout=600)
        answer.raise_for_status()
        ids: list[int] = answer.json()["ddtree"]["token_ids"]
        return ids

    with ThreadPoolExecutor(options.concurrency) as pool:
        return list(track(pool.map(ask, enumerate(prompts)), f"budget {budget}", len(prompts)))


def render(tokenizer: Any, prompt: str) -> torch.Tensor:
    """[1, T] ids of the chat prompt, as the server renders it."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    ids: torch.Tensor = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return ids


@torch.inference_mode()
def generate(model: Any, tokenizer: Any, prompt: str, max_tokens: int) -> list[int]:
    """The target's greedy answer by transformers."""
    ids = render(tokenizer, prompt)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
    )
    answer: list[int] = out[0, ids.shape[1] :].tolist()
    return answer


def differing(prompts: list[str], outputs: dict[str, list[list[int]]], pair: tuple[str, str]) -> list[Difference]:
    found = []
    for prompt, a, b in zip(prompts, outputs[pair[0]], outputs[pair[1]], strict=True):
        if a != b:
            at, tokens = next((i, t) for i, t in enumerate(zip_longest(a, b)) if t[0] != t[1])
            found.append(Difference(prompt, f"{pair[0]} / {pair[1]}", at, tokens, {}))
    return found


@torch.inference_mode()
def scored(
    folder: Path, tokenizer: Any, prompts: list[str], outputs: dict[str, list[list[int]]], differences: list[Difference]
) -> list[Difference]:
    """The differences with the logit gap of their tokens, by the target in both dtypes."""
    gaps: list[dict[str, float]] = [{} for _ in differences]
    for dtype in ("float32", "bfloat16") if differences else ():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        for difference, gap in zip(differences, gaps, strict=True):
            answer = outputs[difference.between.split(" / ")[0]][prompts.index(difference.prompt)]
            prefix = torch.cat(
                [render(tokenizer, difference.prompt), torch.tensor([answer[: difference.position]]).long()], 1
            )
            logits = model(prefix).logits[0, -1].float()
            first, second = difference.tokens
            if first is not None and second is not None:
                gap[dtype] = float(logits[first] - logits[second])
    return [
        Difference(d.prompt, d.between, d.position, d.tokens, gap) for d, gap in zip(differences, gaps, strict=True)
    ]


if __name__ == "__main__":
    main()
