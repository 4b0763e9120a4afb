"""Packed linear layers against plain ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ddtree.drafter.config import DrafterConfig
from ddtree.drafter.dflash import DFlashModel
from ddtree.drafter.packed import PackedLinear, linear, pack_linears, packable

needs_packing = pytest.mark.skipif(
    not packable(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="this CPU or torch has no packed bf16 layers"
)


@needs_packing
@pytest.mark.parametrize("shape", [(1, 24), (16, 24), (70, 24), (3, 5, 24), (0, 24)])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_plain_layer(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).bfloat16(), torch.randn(40, 24).bfloat16()
    offset = torch.randn(40).bfloat16() if bias else None
    torch.testing.assert_close(PackedLinear(weight, offset)(x), F.linear(x, weight, offset), atol=0.05, rtol=0.02)


@needs_packing
def test_packs_a_whole_drafter(config: DrafterConfig, random_model: Callable[..., DFlashModel]) -> None:
    plain, packed = (random_model(config).bfloat16() for _ in range(2))
    pack_linears(packed)
    assert not any(isinstance(module, nn.Linear) for module in packed.modules())
    features = torch.randn(1, 9, 96).bfloat16()
    with torch.inference_mode():
        torch.testing.assert_close(packed.fuse(features), plain.fuse(features), atol=0.05, rtol=0.05)


def test_other_dtypes_stay_plain(config: DrafterConfig, random_model: Callable[..., DFlashModel]) -> None:
    model, weight = random_model(config), torch.randn(40, 24)
    pack_linears(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    x = torch.randn(3, 24)
    assert torch.equal(linear(weight)(x), F.linear(x, weight))
