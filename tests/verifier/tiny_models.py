"""Tiny random checkpoints in Hugging Face form, written on the spot: one per form of attention and of feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 128, "eos_token_id": 2, "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip
# As Kimi K2 has it, but for 8 original positions, so that a short sequence leaves them.
YARN = {
    "type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8, "beta_fast": 1.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


def qwen3(**changes: Any) -> PretrainedConfig:
    """Grouped-query attention."""
    return Qwen3Config(**SIZES | {"num_key_value_heads": 2, "head_dim": 16} | changes)


def qwen3_moe(**changes: Any) -> PretrainedConfig:
    """Grouped-query attention, experts in every layer."""
    experts = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    return Qwen3MoeConfig(**SIZES | {"num_key_value_heads": 2, "head_dim": 16} | experts | changes)


def qwen3_yarn() -> PretrainedConfig:
    """Rotary positions stretched, with the amplitude that this form of YaRN derives."""
    stretch = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8, "rope_theta": 10000.0}
    return qwen3(rope_parameters=stretch)


def deepseek_v3(**changes: Any) -> PretrainedConfig:
    """Latent attention; one dense layer, then routed and shared experts."""
    sizes = {
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }  # fmt: skip
    return DeepseekV3Config(**SIZES | sizes | changes)


def deepseek_v3_yarn(**changes: Any) -> PretrainedConfig:
    """Rotary positions stretched as in Kimi K2, with a factor of the attention scores in place of an amplitude."""
    return deepseek_v3(rope_scaling=dict(YARN), **changes)


KINDS: dict[str, Callable[..., PretrainedConfig]] = {
    kind.__name__: kind for kind in (qwen3, qwen3_yarn, qwen3_moe, deepseek_v3, deepseek_v3_yarn)
}


def write(kind: str, folder: Path, **changes: Any) -> Path:
    """Write the checkpoint of a kind into `folder`. The weights depend on the kind and the changes to its sizes alone."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(KINDS[kind](**changes), dtype=torch.float32)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # zero where nobody trained it
            buffer.copy_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(folder)
    return folder
