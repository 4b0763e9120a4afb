"""Writes the directory of a target with random weights, from the sizes in its config.json. Knows no cache and no backend."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ddtree.verifier.byte_tokenizer import byte_tokenizer
from ddtree.verifier.model_dir import RANDOM_KEY

SEED = 0
_UNSET = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # else a type's default may end an answer


def write(sizes: Mapping[str, Any], folder: Path, *, weights: bool) -> None:
    """Write a Hugging Face directory: config, tokenizer and, with `weights`, a weights file in float32.

    sizes: what a config.json says; what it leaves out is as the model's type has it. The weights depend on the sizes alone.
    Without them the config says so (`RANDOM_KEY`), and backends make their own.

    Raises ValueError for a vocabulary without room for bytes.
    """
    given = _UNSET | {key: value for key, value in sizes.items() if not key.startswith("_")}
    language = given.get("text_config") or given
    byte_tokenizer(language["vocab_size"]).save_pretrained(folder)
    if weights:
        kind = given.pop("model_type")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **given), dtype=torch.float32)
        model.save_pretrained(folder)
        return
    if architecture := MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(given["model_type"]):
        given.setdefault("architectures", [architecture])
    (folder / "config.json").write_text(json.dumps(given | {RANDOM_KEY: True}, indent=2) + "\n")
