"""The target's two ends that a drafter borrows, embedding and lm_head, read from its directory. Knows no layers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddtree.drafter.config import RANDOM_KEY, DrafterInfo
from ddtree.drafter.tensors import read_tensors

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class TargetEnds:
    """Both `[vocab, d]`; one and the same tensor where the target ties them."""

    embedding: Tensor
    lm_head: Tensor

    @classmethod
    def load(
        cls, target_dir: str | Path, info: DrafterInfo, *, dtype: torch.dtype, device: torch.device | str
    ) -> TargetEnds:
        """Reads these two tensors of a Hugging Face directory and nothing else.

        Raises:
            ValueError: no such directory, no such tensors, or a target that this drafter was not made for.
        """
        directory = Path(target_dir)
        config = _text_config(directory)
        info.check_target(config["hidden_size"], config["vocab_size"], config["num_hidden_layers"], str(target_dir))
        if config[RANDOM_KEY]:
            return cls._make(info, bool(config["tie_word_embeddings"]), dtype=dtype, device=device)
        # multimodal targets prefix the names, so only the ends of the names are compared
        tensors = read_tensors(directory, lambda name: name.endswith((EMBEDDING, LM_HEAD)))
        embedding = _only(tensors, EMBEDDING, directory)
        tied = config["tie_word_embeddings"] or not any(name.endswith(LM_HEAD) for name in tensors)
        lm_head = embedding if tied else _only(tensors, LM_HEAD, directory)
        for name, tensor in ((EMBEDDING, embedding), (LM_HEAD, lm_head)):
            if tuple(tensor.shape) != (info.vocab_size, info.hidden_size) or not tensor.is_floating_point():
                raise ValueError(
                    f"target {target_dir}: {name} is {tensor.dtype} {tuple(tensor.shape)}; a drafter needs floating "
                    f"point {(info.vocab_size, info.hidden_size)}"
                )
        embedding = embedding.to(device, dtype)
        return cls(embedding, embedding if tied else lm_head.to(device, dtype))

    @classmethod
    def _make(cls, info: DrafterInfo, tied: bool, *, dtype: torch.dtype, device: torch.device | str) -> TargetEnds:
        """Of a target without a weights file. They are not the numbers that its verifier made: drafts are wrong either way."""
        torch.manual_seed(0)
        ends = [torch.randn(info.vocab_size, info.hidden_size, dtype=dtype, device=device) for _ in range(2 - tied)]
        return cls(ends[0] * 0.02, ends[-1] * 0.02)


def _text_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"no target at {directory}: give a Hugging Face directory with config.json and *.safetensors")
    whole = json.loads(path.read_text())
    config = whole.get("text_config") or whole
    missing = [key for key in ("hidden_size", "vocab_size", "num_hidden_layers") if key not in config]
    if missing:
        raise ValueError(f"target {directory}: config.json lacks {', '.join(missing)}")
    tied = config.get("tie_word_embeddings", whole.get("tie_word_embeddings", False))
    return {**config, "tie_word_embeddings": bool(tied), RANDOM_KEY: bool(whole.get(RANDOM_KEY))}


def _only(tensors: dict[str, Tensor], ending: str, directory: Path) -> Tensor:
    names = [name for name in tensors if name.endswith(ending)]
    if len(names) != 1:
        raise ValueError(f"target {directory}: expected one tensor named …{ending}, found {names or 'none'}")
    return tensors[names[0]]
