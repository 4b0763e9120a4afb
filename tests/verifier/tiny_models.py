"""Tiny random checkpoints in Hugging Face form, written on the spot: one per form of attention and of feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 128, "eos_token_id": 2, "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip


def qwen3() -> PretrainedConfig:
    """Grouped-query attention."""
    return Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16)


def qwen3_moe() -> PretrainedConfig:
    """Grouped-query attention, experts in every layer."""
    return Qwen3MoeConfig(
        **SIZES, num_key_value_heads=2, head_dim=16, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True,
    )  # fmt: skip


def deepseek_v3() -> PretrainedConfig:
    """Latent attention; one dense layer, then routed and shared experts."""
    return DeepseekV3Config(
        **SIZES, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8,
        v_head_dim=16, moe_intermediate_size=32, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2,
        n_group=2, topk_group=1, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5,
    )  # fmt: skip


KINDS: dict[str, Callable[[], PretrainedConfig]] = {"qwen3": qwen3, "qwen3_moe": qwen3_moe, "deepseek_v3": deepseek_v3}


def write(kind: str, folder: Path) -> Path:
    """Write the checkpoint of a kind into `folder`. The weights depend on the kind alone."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(KINDS[kind](), dtype=torch.float32)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # zero where nobody trained it
            buffer.copy_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(folder)
    return folder
