"""Checkpoints on disk: published form, shards, int8 rows, and directories that are not what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ddtree.drafter.checkpoint import load_published, save_int8, save_published
from ddtree.drafter.config import DrafterConfig, DrafterInfo
from ddtree.drafter.dflash import DFlashModel
from ddtree.drafter.int8_rows import dequantise_rows, quantise_rows

Make = Callable[..., DFlashModel]


def test_published_round_trip(config: DrafterConfig, random_model: Make, tmp_path: Path) -> None:
    model = random_model(config)
    save_published(model, tmp_path, dtype=torch.float32)
    loaded = load_published(tmp_path, dtype=torch.float32)
    assert DrafterConfig.from_dict(loaded.config.to_dict()) == config
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_published_default_is_bf16(config: DrafterConfig, random_model: Make, tmp_path: Path) -> None:
    save_published(random_model(config), tmp_path)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert {t.dtype for t in load_published(tmp_path).parameters()} == {torch.bfloat16}


def test_shards(config: DrafterConfig, random_model: Make, tmp_path: Path) -> None:
    model = random_model(config)
    save_published(model, tmp_path, dtype=torch.float32)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(model.state_dict())
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, own in files.items():
        save_file({name: model.state_dict()[name].contiguous() for name in own}, tmp_path / file)
    index = {"weight_map": {name: file for file, own in files.items() for name in own}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = load_published(tmp_path, dtype=torch.float32)
    assert all(torch.equal(loaded.state_dict()[name], model.state_dict()[name]) for name in names)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks model-00002-of-00002\.safetensors"):
        load_published(tmp_path)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 40), st.floats(-30, 30), st.integers(0, 2**31))
def test_int8_rows_error_is_at_most_half_a_step(rows: int, columns: int, exponent: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * 2.0**exponent
    weight[0] = 0
    quantised, scale = quantise_rows(weight)
    assert quantised.dtype == torch.int8 and scale.shape == (rows,)
    error = (dequantise_rows(quantised, scale) - weight).abs()
    assert (error <= weight.abs().amax(1, keepdim=True) / 254 * (1 + 1e-5)).all()
    assert (quantised[0] == 0).all()


def test_int8_round_trip(config: DrafterConfig, random_model: Make, tmp_path: Path) -> None:
    model = random_model(config)
    save_int8(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["fc.weight"].dtype == torch.int8 and stored["fc.weight_scale"].shape == (32,)
    assert DrafterInfo.read(tmp_path).quantization == "int8_rows"
    loaded = load_published(tmp_path, dtype=torch.float32).state_dict()
    for name, tensor in model.state_dict().items():
        bound = tensor.abs().amax(-1, keepdim=True) / 253 if tensor.dim() == 2 else 0.0
        assert ((loaded[name] - tensor).abs() <= bound).all(), name


def test_fp16_scales_are_read(config: DrafterConfig, random_model: Make, tmp_path: Path) -> None:
    save_int8(random_model(config), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    half = {name: tensor.half() if name.endswith("_scale") else tensor for name, tensor in stored.items()}
    exact = load_published(tmp_path, dtype=torch.float32).fc.weight
    save_file(half, tmp_path / "model.safetensors")
    torch.testing.assert_close(load_published(tmp_path, dtype=torch.float32).fc.weight, exact, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("remove", "lacks tensors layers.1.mlp.up_proj.weight"),
        ("add", "has unknown tensors lm_head.weight"),
        ("reshape", r"has misshapen tensors fc.weight \(32, 64\) instead of \(32, 96\)"),
        ("int8", "has unscaled integer tensors fc.weight"),
    ],
)
def test_tensors_that_do_not_match(
    config: DrafterConfig, random_model: Make, tmp_path: Path, damage: str, words: str
) -> None:
    save_published(random_model(config), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    if damage == "remove":
        del stored["layers.1.mlp.up_proj.weight"]
    elif damage == "add":
        stored["lm_head.weight"] = torch.zeros(1)
    elif damage == "reshape":
        stored["fc.weight"] = stored["fc.weight"][:, :64].contiguous()
    else:
        stored["fc.weight"] = stored["fc.weight"].to(torch.int8)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=words):
        load_published(tmp_path)


def test_int8_without_its_scale(config: DrafterConfig, random_model: Make, tmp_path: Path) -> None:
    save_int8(random_model(config), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["fc.weight_scale"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"int8 tensors without .*: fc\.weight"):
        load_published(tmp_path)


def test_no_weights(config: DrafterConfig, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(ValueError, match=r"no \*\.safetensors in"):
        load_published(tmp_path)
