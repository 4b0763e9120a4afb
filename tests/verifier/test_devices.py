"""What shapes a draw, on a GPU as on a CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from ddtree.kernels.noise import KeyedNoise
from ddtree.verifier.batch import LogitEdits, TokenMasks, TokenValues
from ddtree.verifier.edits import edit
from ddtree.verifier.logprobs import logprobs
from ddtree.verifier.masks import mask
from ddtree.verifier.sampling import greedy, sample
from ddtree.verifier.transfer import to_device

from .test_sampling import random_batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU with the CPU")
GPU = torch.device("cuda")
ROWS, VOCABULARY = 40, 5000


def numbers(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("seed", range(4))
def test_draws(seed: int) -> None:
    logits, positions, params = random_batch(ROWS, VOCABULARY, seed)
    params = dataclasses.replace(params, min_p=torch.rand(ROWS, generator=numbers(seed)) / 20)
    expected = sample(logits.clone(), positions, params, KeyedNoise(VOCABULARY))
    got = sample(*to_device((logits.clone(), positions, params), GPU), KeyedNoise(VOCABULARY, GPU))
    assert (got.cpu() == expected).float().mean() >= 0.95  # sums of many numbers end an ulp apart
    assert torch.equal(greedy(logits.to(GPU)).cpu(), greedy(logits))


@pytest.mark.parametrize("seed", range(4))
def test_edits_and_masks(seed: int) -> None:
    g = numbers(seed)

    def ints(most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=g, dtype=torch.int32)

    def values(n: int) -> TokenValues:
        each = torch.randperm(2 * VOCABULARY, generator=g)[:n].int()
        return TokenValues(each % 2, each // 2, torch.randn(n, generator=g).abs().mul(3).round())

    one = torch.ones(2)
    edits = LogitEdits(
        torch.arange(ROWS - 1).int(), ints(2, ROWS - 1), ints(ROWS, ROWS - 1), values(300), values(50), values(20),
        one * 1.3, one * 0.2, one * -0.5,
    )  # fmt: skip
    masks = TokenMasks(torch.arange(0, ROWS, 2).int(), ints(3, ROWS // 2), ints(2**31 - 1, 3, -(-VOCABULARY // 32)))
    logits, positions = torch.randn(ROWS, VOCABULARY, generator=g), ints(30, ROWS)
    tokens, ancestors = ints(VOCABULARY, ROWS), ints(2**31 - 1, ROWS, 2)
    given = (positions, tokens, ancestors, edits)
    expected = mask(edit(logits.clone(), *given), masks)
    there = to_device((logits.clone(), *given), GPU)
    got = mask(edit(*there), to_device(masks, GPU))
    torch.testing.assert_close(got.cpu(), expected, atol=1e-5, rtol=1e-5)


def test_log_probabilities() -> None:
    logits = torch.randn(ROWS, VOCABULARY, generator=numbers(0)) * 3
    logits[7, 3] = torch.nan
    tokens = logits.nan_to_num().argmax(-1).int()
    expected, got = logprobs(logits, tokens, 5), logprobs(logits.to(GPU), tokens.to(GPU), 5)
    torch.testing.assert_close(got.values.cpu(), expected.values, atol=1e-5, rtol=1e-5, equal_nan=True)
    assert torch.equal(got.ids.cpu(), expected.ids) and torch.equal(got.rank.cpu(), expected.rank)
