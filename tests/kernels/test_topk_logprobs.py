"""topk_logprobs against a full float64 sort, with exact ties everywhere, and values that are not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree.kernels import topk_logprobs

from .ref import compare
from .strategies import seeds

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def expected(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Row by row in Python and float64: sort by (logit descending, id ascending)."""
    logprobs = torch.full((len(logits), k), -torch.inf, dtype=torch.float64)
    ids = torch.full((len(logits), k), -1, dtype=torch.int32)
    for r, row in enumerate(logits.double().numpy()):
        tokens = np.flatnonzero(np.isfinite(row))
        if len(tokens):
            peak = row[tokens].max()
            lse = peak + np.log(np.exp(row[tokens] - peak).sum())
            best = tokens[np.lexsort((tokens, -row[tokens]))][:k]
            ids[r, : len(best)] = torch.from_numpy(best.astype(np.int32))
            logprobs[r, : len(best)] = torch.from_numpy(row[best] - lse)
    return logprobs, ids


def check(logits: Tensor, k: int) -> None:
    logprobs, ids = topk_logprobs(logits, k)
    wanted, wanted_ids = expected(logits, k)
    assert (logprobs.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert torch.equal(ids, wanted_ids)
    compare(logprobs, wanted, atol=2e-5, rtol=2e-6)


@st.composite
def logits(draw):
    rng = draw(seeds)
    rows, vocab = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 31, 500, 4096, 4097]))
    x = rng.normal(size=(rows, vocab)) * draw(st.sampled_from([0.0, 0.01, 1.0, 8.0])) + draw(st.sampled_from([0, 25]))
    kind = draw(st.sampled_from(["plain", "rounded", "signed zeros", "masked", "few", "nan", "+inf", "none"]))
    hole = rng.random(x.shape)
    if kind == "rounded":
        x = np.round(x)
    if kind == "signed zeros":
        x = np.where(hole < 0.5, 0.0, -0.0)
    holes = {"masked": (-np.inf, 0.5), "few": (-np.inf, 0.999), "nan": (np.nan, 0.01), "+inf": (np.inf, 0.01)}
    if kind in holes:
        value, share = holes[kind]
        x[hole < share] = value
    if kind == "none":
        x[0] = draw(st.sampled_from([-np.inf, np.nan, np.inf]))
    return torch.from_numpy(x).to(draw(st.sampled_from(DTYPES)))


@given(logits(), st.integers(0, 130))
@settings(max_examples=150, deadline=None)
def test_equals_a_full_sort(x, k):
    check(x, k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0])
def test_serving_shape(dtype, scale):
    """Long rows take the block path; at small scales bfloat16 ties reach past the spare candidates."""
    x = torch.randn(4, 49152, generator=torch.Generator().manual_seed(0)).mul_(scale).to(dtype)
    check(x, 32)


def test_ties_across_blocks_take_the_smallest_ids():
    x = torch.zeros(1, 8192, dtype=torch.bfloat16)
    x[0, 8000:8010] = 1
    assert topk_logprobs(x, 14)[1].tolist() == [[*range(8000, 8010), 0, 1, 2, 3]]


def test_a_row_does_not_depend_on_the_others():
    x = torch.randn(40, 4096, generator=torch.Generator().manual_seed(1)).bfloat16()
    x[7, 5] = torch.nan
    logprobs, ids = topk_logprobs(x, 16)
    for r in (0, 7, 39):
        alone = topk_logprobs(x[r : r + 1], 16)
        assert torch.equal(alone[0][0], logprobs[r])
        assert torch.equal(alone[1][0], ids[r])


def test_no_rows():
    assert [t.shape for t in topk_logprobs(torch.zeros(0, 100), 4)] == [(0, 4), (0, 4)]


def test_arguments():
    with pytest.raises(ValueError, match="k is -1; pass 0 or more"):
        topk_logprobs(torch.zeros(1, 4), -1)
    with pytest.raises(ValueError, match=r"logits has shape \[4\]; pass \[any, any\]"):
        topk_logprobs(torch.zeros(4), 1)
    with pytest.raises(ValueError, match=r"logits is torch.int64; pass torch.float32 or torch.bfloat16"):
        topk_logprobs(torch.zeros(1, 4, dtype=torch.int64), 1)
