"""A small drafter and targets for it, in fp32 with random weights, as directories on disk."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddtree.drafter.checkpoint import save_published
from ddtree.drafter.config import DrafterConfig, Rope, Span
from ddtree.drafter.dflash import DFlashModel

CONFIG = DrafterConfig(
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=97,
    num_target_layers=6,
    target_layer_ids=(1, 3, 4),
    block_size=5,
    mask_token_id=16,
    max_positions=64,
    rope=Rope(theta=10000.0),
    rms_norm_eps=1e-5,
)
SLIDING = (Span(causal=True, window=7), Span())
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="session", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Each device of this machine."""
    return str(request.param)


@pytest.fixture(scope="session")
def config() -> DrafterConfig:
    return CONFIG


@pytest.fixture(scope="session")
def sliding_config() -> DrafterConfig:
    return dataclasses.replace(CONFIG, spans=SLIDING)


@pytest.fixture(scope="session")
def random_model() -> Callable[..., DFlashModel]:
    """config → a model whose every weight, norms included, is random and large enough to matter."""

    def make(config: DrafterConfig, seed: int = 0) -> DFlashModel:
        torch.manual_seed(seed)
        model = DFlashModel(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
        return model.eval()

    return make


@pytest.fixture(scope="session")
def drafter_dir(tmp_path_factory: pytest.TempPathFactory, random_model: Callable[..., DFlashModel]) -> Any:
    """config → a checkpoint directory in fp32; keyword arguments are added to its config.json."""

    def make(config: DrafterConfig, seed: int = 0, **changes: Any) -> Path:
        directory = tmp_path_factory.mktemp("drafter")
        save_published(random_model(config, seed), directory, dtype=torch.float32)
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return directory

    return make


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A Qwen3 or Llama target that transformers itself wrote; keyword arguments change its config."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    def make(kind: str = "qwen3", max_shard_size: str = "1GB", **changes: Any) -> Path:
        sizes: dict[str, Any] = {
            "hidden_size": 32,
            "vocab_size": 97,
            "num_hidden_layers": 6,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
        }
        torch.manual_seed(1)
        cls = {"qwen3": Qwen3Config, "llama": LlamaConfig}[kind]
        model = AutoModelForCausalLM.from_config(cls(**{**sizes, **changes}))
        with torch.no_grad():
            model.get_input_embeddings().weight.normal_(0, 0.5)
            model.get_output_embeddings().weight.normal_(0, 0.5)
        directory = tmp_path_factory.mktemp("target")
        model.save_pretrained(directory, max_shard_size=max_shard_size)
        return directory

    return make
