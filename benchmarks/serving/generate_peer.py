"""transformers' own `generate` as a peer. Setting: the kind of its KV cache, `dynamic`, or `static` with its compiled steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from ddtree.verifier.dtype import resolve_dtype
from ddtree.verifier.model_dir import random_weights

from .peer_job import Engine, Ids, run
from .peers import Job

PAD = 0  # masked on the left; on the right what follows a stop token, which is cut off


def make(job: Job, prompts: Sequence[Ids], setting: str) -> Engine:
    device = torch.device(job.device)
    torch.set_num_threads(job.threads)
    model = _load(Path(job.model_dir), resolve_dtype(job.dtype, device), device)
    static = setting == "static"
    longest = max(map(len, prompts)) if static else 0  # one shape, or each would be compiled anew
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=job.max_tokens,
        eos_token_id=list(job.stop_token_ids) or None,
        pad_token_id=PAD,
        cache_implementation="static" if static else None,
    )

    @torch.inference_mode()
    def answer(group: list[Ids]) -> list[Ids]:
        width = max(longest, *map(len, group))
        rows = [[PAD] * (width - len(ids)) + ids for ids in group]
        masks = [[0] * (width - len(ids)) + [1] * len(ids) for ids in group]
        ids, mask = torch.tensor([rows, masks], device=device)
        out = model.generate(input_ids=ids, attention_mask=mask)
        answers: list[Ids] = out[:, width:].tolist()  # waits for the device
        return answers

    return answer


def _load(model_dir: Path, dtype: torch.dtype, device: torch.device) -> Any:
    if not random_weights(model_dir):
        return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).to(device).eval()
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir), dtype=dtype).eval()


if __name__ == "__main__":
    run(make, ("transformers", "torch"))
