"""Packed linear layers against the plain ones they replace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddtree.kernels.packed_linear import PackedLinear, can_pack, pack, pack_linears, padded_rows

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="this torch was built without oneDNN")


@needs_onednn
@pytest.mark.parametrize("shape", [(1, 48), (1, 17, 48), (3, 5, 48), (0, 48), (1, 0, 48)])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_packed_equals_plain(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(48, 40, bias=bias), torch.randn(shape)
    torch.testing.assert_close(PackedLinear(linear)(x), linear(x), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not can_pack(CPU, torch.bfloat16), reason="oneDNN does not compute in bfloat16 on this CPU")
@pytest.mark.parametrize("n", [1, 7, 33, 200])
@torch.inference_mode()
def test_packed_bfloat16_is_as_exact(n: int) -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(192, 96).bfloat16(), torch.randn(n, 192).bfloat16()
    exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    packed, plain = ((layer(x).double() - exact).abs().max() for layer in (PackedLinear(linear), linear))
    assert packed <= 2 * plain


@needs_onednn
def test_every_linear_is_replaced_and_nothing_else() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Embedding(3, 4)}), nn.LayerNorm(4)
    )
    pack_linears(model)
    assert [type(m) for m in (model[0], model[1]["a"], model[1]["b"], model[2])] == [
        PackedLinear, PackedLinear, nn.Embedding, nn.LayerNorm,
    ]  # fmt: skip


def test_what_onednn_does_not_know_stays_plain() -> None:
    assert not can_pack(torch.device("cuda"), torch.bfloat16)
    assert not can_pack(CPU, torch.float16)
    half = nn.Linear(4, 4).half()
    assert pack(half) is half


def test_rows_are_padded_to_few_numbers() -> None:
    padded = {n: padded_rows(n) for n in range(2049)}
    assert padded.pop(1) == 2, "one alone would not get the bits that it gets among others"
    assert all(n <= p <= 1.13 * n for n, p in padded.items()) and [*padded.values()] == sorted(padded.values())
    assert len(set(padded.values())) < 1024 / 5, (
        "oneDNN keeps so many kernels, and a model's layers have about so many shapes"
    )
