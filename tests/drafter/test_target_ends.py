"""Embedding and lm_head of targets that transformers wrote, tied, sharded and multimodal."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ddtree.drafter.config import DrafterConfig, DrafterInfo
from ddtree.drafter.target_ends import TargetEnds


def load(directory: Path, config: DrafterConfig) -> TargetEnds:
    info = DrafterInfo(**vars(config), checkpoint_dir=Path("the-drafter"))
    return TargetEnds.load(directory, info, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["1GB", "8KB"])
def test_equals_what_transformers_loads(
    target_dir: Callable[..., Path], config: DrafterConfig, kind: str, tied: bool, shard: str
) -> None:
    directory = target_dir(kind, shard, tie_word_embeddings=tied)
    assert (directory / "model.safetensors.index.json").exists() == (shard == "8KB")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ends = load(directory, config)
    assert torch.equal(ends.embedding, model.get_input_embeddings().weight)
    assert torch.equal(ends.lm_head, model.get_output_embeddings().weight)
    assert (ends.embedding is ends.lm_head) == tied


def test_names_of_a_multimodal_target(target_dir: Callable[..., Path], config: DrafterConfig, tmp_path: Path) -> None:
    plain = target_dir()
    stored = load_file(plain / "model.safetensors")
    save_file({f"language_model.{name}": tensor for name, tensor in stored.items()}, tmp_path / "model.safetensors")
    whole = {"model_type": "some_vl", "text_config": json.loads((plain / "config.json").read_text())}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert torch.equal(load(tmp_path, config).lm_head, load(plain, config).lm_head)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 98}, r"vocabulary 98 \(the target's is 97\)"),
        ({"num_target_layers": 8}, r"number of layers 8 \(the target's is 6\)"),
        ({"hidden_size": 64}, r"hidden size 64 \(the target's is 32\)"),
    ],
)
def test_made_for_another_target(
    target_dir: Callable[..., Path], config: DrafterConfig, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=f"drafter made for another target: the-drafter expects {words}"):
        load(target_dir(), dataclasses.replace(config, **change))


def test_no_target_there(config: DrafterConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no target at"):
        load(tmp_path, config)


def test_no_embedding_there(config: DrafterConfig, target_dir: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((target_dir() / "config.json").read_text())
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"expected one tensor named …embed_tokens\.weight, found none"):
        load(tmp_path, config)
