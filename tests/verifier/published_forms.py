"""The forms in which large checkpoints are published, made of small plain ones: the same model, written differently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32  # weights that share a scale
INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "ignore": [
        "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "input_activations": None, "output_activations": None,
        "weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP,
            "dynamic": False, "actorder": None, "observer": "minmax", "observer_kwargs": {},
        },
    }},
}  # fmt: skip


def int4(plain: Path, packed: Path, rounded: Path) -> None:
    """Write a mixture of experts with its routed experts in INT4, as Kimi K2 has them, into `packed`; and in float32 the
    weights that the packed ones stand for into `rounded`."""
    config, weights = _read(plain)
    small: dict[str, Tensor] = {}
    large: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if ".mlp.experts." in name:
            small |= _pack(name.removesuffix("weight"), *_quantise(weight))
            large[name] = _dequantise(*_quantise(weight))
        else:
            small[name] = weight if "e_score" in name else weight.bfloat16()
            large[name] = small[name].float()
    _write(packed, config | {"quantization_config": INT4, "dtype": "bfloat16"}, {"model.safetensors": small})
    _write(rounded, config, {"model.safetensors": large})


def kimi_k25(plain: Path, folder: Path, shards: int = 3) -> Path:
    """Write a DeepSeek-V3 type with YaRN as the language part of a multimodal checkpoint, in several files with an index.

    Its configuration is in the older form, with rotary scaling under `rope_scaling`, as that of Kimi K2.6 is."""
    text, weights = _read(plain)
    quantization = text.pop("quantization_config", None)
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {k: v for k, v in rope.items() if k != "rope_type"}}
    text |= {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "topk_method": "noaux_tc"}
    text |= {"scoring_func": "sigmoid", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    config: dict[str, Any] = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text,
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"}, "vision_config": {"model_type": ""},
        "media_placeholder_token_id": 96, "dtype": text.get("dtype", "float32"),
    }  # fmt: skip
    if quantization:
        config["quantization_config"] = quantization
    whole = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    whole |= {"vision_tower.patch_embed.proj.weight": torch.ones(8, 3, 2, 2), "mm_projector.proj.0.bias": torch.ones(8)}
    names = sorted(whole)
    files = {
        f"model-{i + 1:05}-of-{shards:05}.safetensors": {name: whole[name] for name in names[i::shards]}
        for i in range(shards)
    }
    _write(folder, config, files)
    index = {"metadata": {}, "weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, columns] → integers from -8 to 7 of the same shape, and the bfloat16 scale of each group of columns."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(-1) / 7).bfloat16()
    return (groups / scale.float()[..., None]).round().clamp(-8, 7).flatten(1), scale


def _dequantise(integers: Tensor, scale: Tensor) -> Tensor:
    return (integers.unflatten(1, (-1, GROUP)) * scale.float()[..., None]).flatten(1)


def _pack(name: str, integers: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Eight integers, each with 8 added, in the bits of an int32, the first in the lowest."""
    nibbles = (integers.long() + 8).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    packed = nibbles.sum(-1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).int()
    shape = torch.tensor(integers.shape)
    return {f"{name}weight_packed": packed, f"{name}weight_scale": scale, f"{name}weight_shape": shape}


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def _write(folder: Path, config: dict[str, Any], files: dict[str, dict[str, Tensor]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, tensors in files.items():
        save_file({key: t.contiguous() for key, t in tensors.items()}, folder / name, metadata={"format": "pt"})
