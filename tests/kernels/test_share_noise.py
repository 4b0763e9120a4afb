"""share_noise against its definition, number by number, and against the draws that it foresees."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.kernels import reference, share_noise, share_noise_path
from ddtree.kernels.noise import gumbel

from .devices import on_devices, poisoned_memory
from .strategies import candidates, kinds, seeds, token_ids

Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def random_call(rng: np.random.Generator, batch: int, levels: int, width: int, kind: str) -> Given:
    shape = batch, levels, width
    logprobs = np.array([candidates(rng, levels, width, kind) for _ in range(batch)], np.float32).reshape(shape)
    ids = np.array([token_ids(rng, levels, width) for _ in range(batch)], np.int32).reshape(shape)
    seed = rng.integers(-(2**63), 2**63 - 1, batch)
    numbers = rng.integers(0, 2**31 - 100, batch).astype(np.int32), rng.choice([0, 0.3, 1, 2], batch)
    return tuple(torch.from_numpy(x) for x in (logprobs, ids, seed, numbers[0], numbers[1].astype(np.float32)))


@on_devices
@given(seeds, st.integers(0, 4), st.integers(1, 5), st.integers(1, 70), kinds)
@settings(max_examples=60, deadline=None)
def test_rows_follow_their_definition(device, rng, batch, levels, width, kind):
    given_ = random_call(rng, batch, levels, width, kind)
    with poisoned_memory():
        shared, named = share_noise(*(x.to(device) for x in given_))
    assert shared.dtype == torch.float32 and named.dtype == torch.int32
    logprobs, ids, seed, seq_len, scale = (x.tolist() for x in given_)
    for b, level in np.ndindex(batch, levels):
        got = list(zip(shared[b, level].tolist(), named[b, level].tolist(), strict=True))
        row = list(zip(logprobs[b][level], ids[b][level], strict=True))
        if scale[b] == 0:
            assert str(got) == str(row)
            continue
        position = torch.tensor(seq_len[b] + 1 + level)
        score = {
            token: x + scale[b] * gumbel(torch.tensor(seed[b]), position, torch.tensor([token])).item()
            for x, token in row
            if math.isfinite(x)
        }
        total = math.log(sum(math.exp(s - max(score.values())) for s in score.values())) if score else 0
        assert sorted(token for _, token in got[: len(score)]) == sorted(score)
        assert got[len(score) :] == [(-math.inf, -1)] * (width - len(score))
        expected = [score[token] - max(score.values()) - total for _, token in got[: len(score)]]
        assert [x for x, _ in got[: len(score)]] == pytest.approx(expected, abs=2e-4, rel=1e-5)
        assert all(a >= b for (a, _), (b, _) in pairwise(got)) and got[0][0] <= 0


@on_devices
def test_a_drafter_that_knows_the_target_knows_the_draw(device):
    """Its first candidate is what the target draws at every position."""
    torch.manual_seed(0)
    batch, levels, vocab_size = 3, 7, 40
    logits = torch.randn(batch, levels, vocab_size) * 2
    logprobs, ids = logits.log_softmax(-1).sort(-1, descending=True)
    seed, seq_len = torch.tensor([5, -6, 2**62]), torch.tensor([0, 30, 1000], dtype=torch.int32)
    temperature = torch.tensor([0.5, 1.0, 3.0])
    _, named = share_noise(*(x.to(device) for x in (logprobs, ids.int(), seed, seq_len, temperature)))
    position = seq_len[:, None, None] + 1 + torch.arange(levels)[:, None]
    noise = gumbel(seed[:, None, None], position.long(), torch.arange(vocab_size))
    drawn = (logits / temperature[:, None, None] + noise).argmax(-1)
    assert named[..., 0].tolist() == drawn.tolist()
    assert (ids[..., 0] != drawn).any()


@on_devices
def test_many_candidates_and_pinned_numbers(device):
    given_ = random_call(np.random.default_rng(0), 2, 3, 700, "peaky")
    small = [x.pin_memory() if device == "cuda" else x for x in given_[2:]]
    shared, named = share_noise(*(x.to(device) for x in given_[:2]), *small)
    expected, names = reference.share_noise(*given_)
    torch.testing.assert_close(shared.cpu(), expected, atol=2e-5, rtol=1e-5)
    assert (named.cpu() == names).float().mean() > 0.99  # neighbours an ulp apart may change places


@on_devices
@given(seeds, st.integers(0, 3), st.integers(1, 5), st.integers(1, 128), kinds)
@settings(max_examples=40, deadline=None)
def test_rows_by_parent_are_scored_like_rows(device, rng, batch, levels, width, kind):
    _, ids, *numbers = random_call(rng, batch, levels, width, "flat")
    rows = rng.permuted(candidates(rng, batch * (1 + (levels - 1) * width), width, kind), axis=1)
    first, *conditional = torch.from_numpy(rows).split([batch, batch * (levels - 1) * width])
    given_ = first, conditional[0].view(batch, levels - 1, width, width), ids, *numbers
    with poisoned_memory():
        shared = share_noise_path(*(x.to(device) for x in given_))
    seed, seq_len, scale = (x[:, None, None] for x in numbers)
    noise = scale * gumbel(seed, seq_len.long() + 1 + torch.arange(levels)[:, None], ids.long())
    for got, logprobs, own in zip(shared, given_, (noise[:, 0], noise[:, 1:, None]), strict=False):
        found, drawn = torch.isfinite(logprobs), numbers[2] > 0
        expected = (logprobs + own).double().where(found, -torch.inf).log_softmax(-1).where(found, -torch.inf)
        torch.testing.assert_close(got.cpu()[drawn].double(), expected[drawn], atol=2e-4, rtol=1e-5)
        assert (got <= 0)[drawn].all()
        assert str(got[~drawn].tolist()) == str(logprobs[~drawn].tolist())


def test_arguments():
    given_ = random_call(np.random.default_rng(0), 2, 3, 4, "peaky")
    with pytest.raises(ValueError, match=r"seed is torch.int32; pass torch.int64"):
        share_noise(*given_[:2], given_[2].int(), *given_[3:])
    with pytest.raises(ValueError, match=r"scale has shape \[1\]; pass \[2\]"):
        share_noise(*given_[:4], given_[4][:1])
