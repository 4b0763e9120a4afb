"""What a model directory says of itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PretrainedConfig, Qwen2Config

from ddtree.verifier.model_dir import TargetInfo, resolve

from .conftest import SIZES, TINY


def write(directory: Path, **changes: object) -> Path:
    directory.mkdir(exist_ok=True)
    config = {
        "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 100, "max_position_embeddings": 512, "eos_token_id": 7,
    } | changes  # fmt: skip
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return directory


def test_fields(tmp_path: Path) -> None:
    info = TargetInfo.read(write(tmp_path / "some-model"))
    assert (info.name, info.model_type, info.model_dir) == ("some-model", "qwen3", tmp_path / "some-model")
    assert (info.vocab_size, info.hidden_size, info.num_layers, info.max_positions) == (100, 64, 3, 512)
    assert (info.num_heads, info.num_kv_heads, info.head_dim, info.eos_token_ids) == (4, 2, 32, (7,))
    assert info.kv_bytes_per_token("bfloat16") == 2 * 3 * 2 * 32 * 2
    assert info.kv_bytes_per_token("float32") == 2 * info.kv_bytes_per_token("float16")
    with pytest.raises(ValueError, match="unknown KV dtype 'int8'; valid are float32, bfloat16, float16"):
        info.kv_bytes_per_token("int8")


def test_sizes_left_out_follow_from_the_others(tmp_path: Path) -> None:
    info = TargetInfo.read(write(tmp_path, model_type="llama", head_dim=None, num_key_value_heads=None))
    assert (info.num_kv_heads, info.head_dim) == (4, 16)


@pytest.mark.parametrize(
    "config", [*(make() for make in TINY.values()), Qwen2Config(**SIZES)], ids=lambda c: c.model_type
)
def test_directories_that_transformers_wrote(tmp_path: Path, config: PretrainedConfig) -> None:
    config.save_pretrained(tmp_path)
    info = TargetInfo.read(tmp_path)
    assert (info.model_type, info.num_kv_heads, info.eos_token_ids) == (config.model_type, 2, (2,))
    assert info.head_dim == getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=9)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 9, 1]}))
    assert TargetInfo.read(tmp_path).eos_token_ids == (1, 3, 9)
    assert TargetInfo.read(write(tmp_path / "none", eos_token_id=None)).eos_token_ids == ()


def test_positions_and_types_of_published_models(tmp_path: Path) -> None:
    kimi = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0}
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "max_position_embeddings": 262144, "rope_theta": 50000.0}
    info = TargetInfo.read(write(tmp_path / "kimi", model_type="kimi_k2", rope_scaling=kimi, **sizes))
    assert (info.model_type, info.max_positions, info.latent_width) == ("deepseek_v3", 262144, 576)
    qwen = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    info = TargetInfo.read(write(tmp_path / "qwen", rope_scaling=qwen, max_position_embeddings=40960))
    assert info.max_positions == 131072, "as far as the stretched embedding reaches, and no further"


def test_fingerprint_follows_what_the_model_computes(tmp_path: Path) -> None:
    def fingerprint(name: str, **changes: object) -> str:
        return TargetInfo.read(write(tmp_path / name, **changes)).fingerprint

    base = fingerprint("a")
    assert base == fingerprint("b", transformers_version="9", dtype="float16")
    assert len({base, fingerprint("c", rope_theta=5.0), fingerprint("d", num_hidden_layers=4)}) == 3
    (tmp_path / "b" / "ddtree.json").write_text(json.dumps({"name": "embedded", "source_sha256": "00"}))
    info = TargetInfo.read(tmp_path / "b")
    assert info.fingerprint != base and info.name == "embedded"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "is a 'mamba' model; supported types are llama, qwen2, qwen3"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' rotary scaling"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope' rotary scaling"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "YaRN needs the numbers 'factor' and 'original_max_pos"),
        ({"vocab_size": None}, "lacks the number 'vocab_size'"),
    ],
)
def test_a_model_that_cannot_run_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TargetInfo.read(write(tmp_path, **changes))


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model directory at"):
        TargetInfo.read(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        TargetInfo.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        TargetInfo.read(tmp_path)


def test_resolve(tmp_path: Path) -> None:
    assert resolve(write(tmp_path / "m")) == tmp_path / "m"
    for wrong, why in ((tmp_path / "gone", "is no directory"), (tmp_path, r"has no config\.json")):
        with pytest.raises(ValueError, match=f"{why}; give a Hugging Face directory or one of: smollm2-135m-instruct"):
            resolve(str(wrong))


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys; from ddtree.verifier import backends, model_dir, pages; model_dir.TargetInfo.read(sys.argv[1])"
    code += "; backends.check_backend('hf'); assert not {'torch', 'transformers', 'gguf'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code, str(write(tmp_path))], check=True)
