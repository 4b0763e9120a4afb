"""The Triton baseline of verify_attn_mla against float64. `test_triton_mla.py` runs these in a process of their own, because
Triton's interpreter needs TRITON_INTERPRET set before triton is first imported.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ddtree.kernels.triton_mla import verify_attn_mla

from .cases import Case, Inputs, make
from .ref import compare

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.float16] if DEVICE == "cpu" else [torch.float16, torch.bfloat16]  # no bf16 interpreted


def run(inputs: Inputs, splits: int | None = None) -> tuple[Tensor, Tensor]:
    rows = replace(inputs.rows, **{k: v.to(DEVICE) for k, v in vars(inputs.rows).items() if isinstance(v, Tensor)})
    q, cache = inputs.q.to(DEVICE), inputs.caches[0].to(DEVICE)
    scale, v_dim = inputs.case.dim**-0.5, inputs.case.v_dim
    assert v_dim is not None
    out, lse = verify_attn_mla(q, cache, rows, scale=scale, v_dim=v_dim, splits=splits)
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize(
    "case",
    [
        Case((65, 0, 63), (9, 17, 5), (False, True, False), heads=8, dim=24, v_dim=16, padded_rows=3, garbage_pages=1),
        Case((130, 64), (33, 65), (False, False), heads=3, dim=20, v_dim=20, page_size=5),
        Case((0, 1), (40, 0), (True, False), heads=1, dim=20, v_dim=3, page_size=1, padded_rows=2),
        Case((70,), (5,), (False,), heads=4, dim=576, v_dim=512),  # the DeepSeek-V3 widths
    ],
    ids=["mixed", "no-rotary", "few", "deepseek"],
)
def test_equals_float64(case: Case, splits: int | None, dtype: torch.dtype) -> None:
    case = replace(case, dtype=dtype)
    inputs = make(case)
    (out, lse), (wanted, wanted_lse) = run(inputs, splits), inputs.expected()
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    compare(out, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype], cosine=1e-4)
    compare(lse, wanted_lse, atol=1e-5 if dtype is torch.float32 else 3e-4, rtol=1e-5)


@pytest.mark.parametrize("splits", [1, 2])
def test_a_non_ancestor_changes_no_bit(splits: int) -> None:
    inputs = make(Case((65,), (33,), (False,), dim=24, v_dim=16, dtype=DTYPES[-1]))
    out, lse = run(inputs, splits)
    for changed in (1, 32):
        cache = inputs.caches[0].clone()
        cache[inputs.place(0, 65 + changed)] *= -100
        new_out, new_lse = run(replace(inputs, caches=[cache]), splits)
        blind = torch.tensor([changed not in seen for seen in inputs.visible[0]])
        assert torch.equal(new_out[blind], out[blind])
        assert torch.equal(new_lse[blind], lse[blind])
        assert not torch.equal(new_out[~blind], out[~blind])


def test_no_rows() -> None:
    out, lse = run(make(Case((), (), (), dim=24, v_dim=16)))
    assert (out.shape, lse.shape) == ((0, 4, 16), (0, 4))
