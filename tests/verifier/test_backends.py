"""Names of backends and dtypes, and the pool they fill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddtree.verifier.backends import check_backend, load_target
from ddtree.verifier.dtype import choose_dtype
from ddtree.verifier.hf import HFTarget
from ddtree.verifier.pool import KVPool

OPTIONS = {"device": "cpu", "page_size": 4, "pages": 3, "feature_layers": (1,), "threads": 1}


def test_hf_loads_by_name(tiny_dir: Callable[[str], Path]) -> None:
    target = load_target("hf", str(tiny_dir("qwen3")), dtype="bfloat16", **OPTIONS)
    assert isinstance(target, HFTarget) and target.info.model_type == "qwen3"
    assert target.dtype == target.pool.k.dtype == torch.bfloat16
    assert target.pool.kv_bytes_per_token == target.info.kv_bytes_per_token("bfloat16")


def test_unknown_names_list_the_valid_ones(tiny_dir: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="unknown verifier backend 'tgi'; valid are: hf"):
        load_target("tgi", "", dtype="auto", **OPTIONS)
    with pytest.raises(ValueError, match="comes with the `vllm` extra and is not built in yet; valid are: hf"):
        check_backend("vllm")
    with pytest.raises(ValueError, match="unknown dtype 'fp8'; valid are auto, float32, bfloat16, float16"):
        load_target("hf", str(tiny_dir("llama")), dtype="fp8", **OPTIONS)


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
