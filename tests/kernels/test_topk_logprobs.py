"""topk_logprobs against a full float64 sort, with exact ties everywhere, and values that are not finite."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree.kernels import topk_logprobs
from ddtree.kernels.topk_logprobs import topk_merge, topk_partial

from .devices import on_devices
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


def assert_right(got: tuple[Tensor, Tensor], logits: Tensor) -> None:
    logprobs, ids = (x.cpu() for x in got)
    wanted, wanted_ids = expected(logits, ids.shape[1])
    assert (logprobs.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert torch.equal(ids, wanted_ids)
    compare(logprobs, wanted, atol=2e-5, rtol=2e-6)


def check(logits: Tensor, k: int, device: str) -> None:
    assert_right(topk_logprobs(logits.to(device), k), logits)


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


@on_devices
@given(x=logits(), k=st.integers(0, 130))
@settings(max_examples=150, deadline=None)
def test_equals_a_full_sort(device, x, k):
    check(x, k, device)


@on_devices
@pytest.mark.parametrize("k", [1, 64, 1000, 1024])
@pytest.mark.parametrize("kind", ["random", "ascending", "equal", "crowded", "nearly empty"])
def test_long_rows(device, kind, k):
    """Several blocks per row on a GPU, among them the rows on which a search for the k-th best is slowest."""
    vocab = 40_001
    x = torch.randn(2, vocab, generator=torch.Generator().manual_seed(0))
    if kind == "ascending":
        x = torch.arange(vocab).float().expand(2, vocab) / 1000
    if kind == "equal":
        x = torch.full_like(x, -1.5)
    if kind == "crowded":
        x[:, 9_000:9_500] += 30
    if kind == "nearly empty":
        x[:, 5:] = -torch.inf
    check(x, k, device)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", range(9))
def test_rows_that_start_anywhere(device, dtype, start):
    """Rows of an odd stride at every offset from a 16-byte boundary, among NaN that must not be read as logits."""
    whole = torch.full((3 * 1003 + 9,), torch.nan, dtype=dtype)
    x = whole[start : start + 3 * 1003].view(3, 1003)[:, :1000]
    x.copy_(torch.randn(3, 1000, generator=torch.Generator().manual_seed(start)))
    held = whole.to(device)[start : start + 3 * 1003].view(3, 1003)[:, :1000]
    assert_right(topk_logprobs(held, 20), x)


@on_devices
@given(x=logits(), k=st.integers(0, 40), random=seeds, parts=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_shares_of_a_split_vocabulary_merge_to_the_whole(device, x, k, random, parts):
    cuts = [0, *sorted(random.integers(0, x.shape[1] + 1, parts - 1).tolist()), x.shape[1]]
    held = x.to(device)
    shares = [topk_partial(held[:, a:b], k, first_id=a) for a, b in itertools.pairwise(cuts)]
    for (a, b), (values, ids, lse) in zip(itertools.pairwise(cuts), shares, strict=True):
        share = x[:, a:b].double().masked_fill(~x[:, a:b].isfinite(), -torch.inf)
        compare(lse.cpu(), share.logsumexp(1), atol=2e-5, rtol=2e-6)
        present = ids >= 0
        assert torch.equal(values[present], held.gather(1, ids.clamp(0).long())[present].float())
    assert_right(topk_merge(*(torch.stack(share) for share in zip(*shares, strict=True))), x)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0])
def test_serving_shape(device, dtype, scale):
    """Long rows take the block path; at small scales bfloat16 ties reach past the spare candidates."""
    x = torch.randn(4, 49152, generator=torch.Generator().manual_seed(0)).mul_(scale).to(dtype)
    check(x, 32, device)


@on_devices
def test_ties_across_blocks_take_the_smallest_ids(device):
    x = torch.zeros(1, 8192, dtype=torch.bfloat16, device=device)
    x[0, 8000:8010] = 1
    assert topk_logprobs(x, 14)[1].tolist() == [[*range(8000, 8010), 0, 1, 2, 3]]


@on_devices
def test_a_row_does_not_depend_on_the_others(device):
    x = torch.randn(40, 4096, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    x[7, 5] = torch.nan
    logprobs, ids = topk_logprobs(x, 16)
    for r in (0, 7, 39):
        alone = topk_logprobs(x[r : r + 1], 16)
        assert torch.equal(alone[0][0], logprobs[r])
        assert torch.equal(alone[1][0], ids[r])


@on_devices
def test_no_rows_and_no_columns(device):
    assert [t.shape for t in topk_logprobs(torch.zeros(0, 100, device=device), 4)] == [(0, 4), (0, 4)]
    check(torch.zeros(2, 0), 3, device)


def test_arguments():
    with pytest.raises(ValueError, match="k is -1; pass 0 or more"):
        topk_logprobs(torch.zeros(1, 4), -1)
    with pytest.raises(ValueError, match=r"logits has shape \[4\]; pass \[any, any\]"):
        topk_logprobs(torch.zeros(4), 1)
    with pytest.raises(ValueError, match=r"logits is torch.int64; pass torch.float32 or torch.bfloat16"):
        topk_logprobs(torch.zeros(1, 4, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match="k is 1 and first_id -1; pass 0 or more"):
        topk_partial(torch.zeros(1, 4), 1, -1)
    with pytest.raises(ValueError, match=r"lse has shape \[2, 4\]; pass \[2, 3\]"):
        topk_merge(torch.zeros(2, 3, 1), torch.zeros(2, 3, 1, dtype=torch.int32), torch.zeros(2, 4))
