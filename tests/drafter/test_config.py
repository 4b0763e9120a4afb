"""config.json of published and own checkpoints: what is read, what is refused, in which words."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddtree.drafter.config import DrafterConfig, DrafterInfo, Rope, Span, default_target_layer_ids

KIMI_K2_6: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "some_key_of_the_future": [1, 2],
    "block_size": 8,
    "num_target_layers": 61,
    "num_hidden_layers": 6,
    "hidden_size": 7168,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 18432,
    "vocab_size": 163840,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 262144,
    "dflash_config": {"mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
}


def without(key: str) -> dict[str, Any]:
    config = {**KIMI_K2_6, "dflash_config": dict(KIMI_K2_6["dflash_config"])}
    config["dflash_config"].pop(key, None)
    config.pop(key, None)
    return config


def test_reads_the_published_form() -> None:
    config = DrafterConfig.from_dict(KIMI_K2_6)
    assert (config.block_size, config.horizon, config.mask_token_id) == (8, 7, 163838)
    assert config.target_layer_ids == (1, 12, 24, 35, 47, 58)
    assert config.rope.rope_type == "yarn" and config.rope.factor == 64 and config.rope.amplitude == 1.0
    assert config.spans == (Span(),) * 6


@pytest.mark.parametrize(
    ("target_layers", "count", "ids"),
    [(36, 5, (1, 9, 17, 25, 33)), (61, 6, (1, 12, 24, 35, 47, 58)), (30, 5, (1, 8, 14, 20, 27)), (36, 1, (18,))],
)
def test_default_layer_ids_are_the_published_ones(target_layers: int, count: int, ids: tuple[int, ...]) -> None:
    assert default_target_layer_ids(target_layers, count) == ids


def test_layer_ids_default_where_absent() -> None:
    assert DrafterConfig.from_dict(without("target_layer_ids")).target_layer_ids == (1, 12, 24, 35, 47, 58)


@pytest.mark.parametrize(
    "key",
    [
        "block_size",
        "mask_token_id",
        "num_target_layers",
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "rms_norm_eps",
        "rope_theta",
        "max_position_embeddings",
    ],
)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        DrafterConfig.from_dict(without(key))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel.*known: DFlashDraftModel"),
        ({"hidden_act": "gelu"}, "gelu.*known: silu"),
        ({"layer_types": ["full_attention"] * 5 + ["linear_attention"]}, "linear_attention.*known: full_attention"),
        ({"layer_types": ["full_attention"] * 5}, "names 5 layers, num_hidden_layers is 6"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope.*known: default, yarn"),
        ({"num_key_value_heads": 7}, "64 query heads cannot share 7"),
        ({"num_target_layers": 58}, "target_layer_ids .* must name target layers 0 to 57"),
        ({"block_size": 1}, "use 2 or more"),
        ({"vocab_size": 163838}, "mask_token_id 163838 is outside"),
    ],
)
def test_what_cannot_be_honoured_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DrafterConfig.from_dict({**KIMI_K2_6, **change})


def test_sliding_layers() -> None:
    types = ["sliding_attention"] * 5 + ["full_attention"]
    sliding = {**KIMI_K2_6, "layer_types": types, "sliding_window": 2048, "use_sliding_window": True}
    assert DrafterConfig.from_dict(sliding).spans == (Span(causal=True, window=2048),) * 5 + (Span(),)
    both_ways = DrafterConfig.from_dict({**sliding, "is_causal": False})
    assert both_ways.spans == (Span(causal=False, window=2048),) * 5 + (Span(),)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"spans": (Span(causal=True, window=9), Span())},
        {"spans": (Span(window=9), Span())},
        {"rope": Rope(1e4, "yarn", 8.0, 4096, mscale=1.0, mscale_all_dim=0.5, truncate=False)},
        {"attention_bias": True, "logit_softcap": 30.0, "logit_scale": 0.5, "embedding_scale": 2.0},
    ],
)
def test_round_trip(config: DrafterConfig, change: dict[str, Any]) -> None:
    changed = dataclasses.replace(config, **change)
    assert DrafterConfig.from_dict(json.loads(json.dumps(changed.to_dict()))) == changed


def test_info_reads_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KIMI_K2_6))
    info = DrafterInfo.read(tmp_path)
    assert (info.checkpoint_dir, info.quantization, info.horizon) == (tmp_path, None, 7)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization 'gptq' is not supported"),
        (
            {"ddtree_quantization": {"format": "int4_rows"}},
            "quantization 'int4_rows' is not supported; known: int8_rows",
        ),
    ],
)
def test_other_quantisations_are_refused_by_name(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**KIMI_K2_6, **change}))
    with pytest.raises(ValueError, match=words):
        DrafterInfo.read(tmp_path)


def test_no_drafter_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no drafter at .*: give a directory with config\.json"):
        DrafterInfo.read(tmp_path)


def test_made_for_another_target(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KIMI_K2_6))
    info = DrafterInfo.read(tmp_path)
    info.check_target(7168, 163840, 61, "Kimi-K2.6")
    with pytest.raises(ValueError, match=r"made for another target.*vocabulary 163840 \(the target's is 32000\)"):
        info.check_target(7168, 32000, 61, "other")


def test_drafts_only_where_a_whole_block_fits() -> None:
    config = DrafterConfig.from_dict({**KIMI_K2_6, "max_position_embeddings": 4096})
    assert config.drafts_at(4088) and not config.drafts_at(4089) and not config.drafts_at(-1)


def test_needs_no_torch() -> None:
    program = "import sys, ddtree.drafter; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
