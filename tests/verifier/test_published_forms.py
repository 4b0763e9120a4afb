"""Checkpoints as they are published: what their directories say, and the backend `hf` on those that it serves."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ddtree.verifier.backends import check_backend
from ddtree.verifier.model_dir import TargetInfo, language_config

from . import published_forms, tiny_models
from .conftest import Harness, harness
from .test_hf import PROMPT, prompted


@pytest.fixture(scope="module")
def yarn_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write("deepseek_v3_yarn", tmp_path_factory.mktemp("yarn"))


@pytest.fixture(scope="module")
def kimi_dir(yarn_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published_forms.kimi_k25(yarn_dir, tmp_path_factory.mktemp("kimi"))


def test_the_language_part_of_a_multimodal_model_is_read(yarn_dir: Path, kimi_dir: Path) -> None:
    part, plain = TargetInfo.read(kimi_dir), TargetInfo.read(yarn_dir)
    differ = {"name", "model_dir", "fingerprint"}
    assert {k: v for k, v in vars(part).items() if k not in differ} == {
        k: v for k, v in vars(plain).items() if k not in differ
    }
    assert (part.model_type, part.latent_width, part.eos_token_ids) == ("deepseek_v3", 40, (2,))
    config, prefix = language_config(kimi_dir)
    assert prefix == "language_model." and "auto_map" not in config
    assert language_config(yarn_dir) == (json.loads((yarn_dir / "config.json").read_text()), "")


def test_what_the_whole_says_holds_for_the_language_part(kimi_dir: Path, tmp_path: Path) -> None:
    whole = json.loads((kimi_dir / "config.json").read_text())
    whole["text_config"].pop("eos_token_id")
    whole |= {"quantization_config": published_forms.INT4, "eos_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    info = TargetInfo.read(tmp_path)
    assert (info.quantization, info.eos_token_ids) == ("compressed-tensors", (7, 9))
    (tmp_path / "config.json").write_text(json.dumps(whole | {"text_config": None}))
    with pytest.raises(ValueError, match="lacks the object 'text_config'"):
        TargetInfo.read(tmp_path)


@pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None,
    reason="needs compressed-tensors, which comes with vLLM",
)
def test_packed_weights_stand_for_the_rounded_ones(yarn_dir: Path, tmp_path: Path) -> None:
    """As transformers unpacks them."""
    from transformers import CompressedTensorsConfig

    published_forms.int4(yarn_dir, tmp_path / "packed", tmp_path / "rounded")
    unpack = CompressedTensorsConfig(run_compressed=False)
    unpacked, rounded, exact = (
        AutoModelForCausalLM.from_pretrained(folder, **more).state_dict()
        for folder, more in (
            (tmp_path / "packed", {"quantization_config": unpack}),
            (tmp_path / "rounded", {}),
            (yarn_dir, {}),
        )
    )
    assert unpacked.keys() == rounded.keys()
    for name, weight in rounded.items():
        assert torch.equal(unpacked[name].bfloat16(), weight.bfloat16()), name
        if ".experts." in name:
            assert (weight - exact[name]).norm() > 0.05 * exact[name].norm(), "rounding must show"


def test_hf_refuses_what_it_cannot_serve(yarn_dir: Path, tmp_path: Path) -> None:
    published_forms.int4(yarn_dir, tmp_path / "packed", tmp_path / "rounded")
    message = "'hf' cannot serve 'deepseek_v3' weights quantised by compressed-tensors; use backend 'vllm'"
    with pytest.raises(ValueError, match=message):
        check_backend("hf", TargetInfo.read(tmp_path / "packed"))
    folder = tiny_models.write("qwen3", tmp_path / "qwen3")
    check_backend("hf", TargetInfo.read(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match="'qwen3' weights quantised by fp8; use backend 'vllm'"):
        check_backend("hf", TargetInfo.read(folder))


def check(h: Harness) -> None:
    sequence = prompted(h, [*PROMPT, *PROMPT]).sequence
    tree = h.random_tree(sequence, 50, 9, torch.Generator().manual_seed(0))
    [output] = h.step(tree)
    h.check_rows(tree, [*PROMPT, *PROMPT], output, atol=5e-5)


def test_hf_serves_yarn(tmp_path: Path) -> None:
    folder = tiny_models.write("qwen3_yarn", tmp_path)
    assert TargetInfo.read(folder).max_positions == 128, "16 times the original 8 positions"
    check(harness(folder, (0, 2), pages=32))
    plain, stretched = (
        AutoModelForCausalLM.from_pretrained(x).eval()(torch.tensor([PROMPT])).logits
        for x in (tiny_models.write("qwen3", tmp_path / "plain"), folder)
    )
    assert not torch.allclose(plain, stretched, atol=1e-2), "the stretching must show"


def test_hf_serves_sharded_weights(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_models.write("qwen3", tmp_path / "whole"))
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    check(harness(tmp_path / "shards", (0, 2), pages=32))
