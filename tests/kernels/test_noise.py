"""Philox against its published known answers; the noise against its definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.kernels.noise import KeyedNoise, gumbel, philox

# Random123, examples/kat_vectors, philox4x32 10: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
int64 = st.integers(-(2**63), 2**63 - 1)


def words(text: str) -> list[torch.Tensor]:
    return [torch.tensor(int(word, 16)) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: str, key: str, result: str) -> None:
    assert list(philox(tuple(words(counter)), tuple(words(key)))) == words(result)


@settings(deadline=None, max_examples=50)
@given(seed=int64, position=st.integers(0, 2**40), token=st.integers(0, 300_000))
def test_a_number_follows_its_definition(seed: int, position: int, token: int) -> None:
    counter = [torch.tensor(w) for w in (token // 4, position % 2**32, position // 2**32, 0)]
    key = [torch.tensor(w) for w in (seed % 2**32, (seed % 2**64) // 2**32)]
    u = ((int(philox(tuple(counter), tuple(key))[token % 4]) >> 8) + 0.5) / 2**24
    drawn = gumbel(torch.tensor(seed), torch.tensor(position), torch.tensor([token]))
    assert drawn.item() == pytest.approx(-math.log(-math.log(u)), rel=1e-6)


@settings(deadline=None, max_examples=50)
@given(
    keys=st.lists(st.tuples(int64, st.integers(0, 5)), max_size=12), capacity=st.integers(1, 3), vocab=st.integers(1, 9)
)
def test_rows_are_the_same_kept_or_not(keys: list[tuple[int, int]], capacity: int, vocab: int) -> None:
    noise = KeyedNoise(vocab, max_bytes=4 * vocab * capacity)
    for seed, position in keys:
        expected = gumbel(torch.tensor(seed), torch.tensor(position), torch.arange(vocab))
        assert torch.equal(noise.row(seed, position), expected)
        assert torch.equal(noise.row(seed, position), expected)


def test_extreme_words_stay_finite() -> None:
    from ddtree.kernels.noise import _to_gumbel

    ends = _to_gumbel(torch.tensor([0, 2**32 - 1]))
    assert ends.tolist() == pytest.approx([-math.log(math.log(2**25)), math.log(2**25)], rel=1e-6)


def test_noise_is_gumbel_and_neighbours_are_independent() -> None:
    rows = torch.stack([KeyedNoise(50_000).row(seed, position) for seed in (0, 1) for position in (7, 8)]).double()
    uniform = (-(-rows).exp()).exp()
    deciles = torch.histc(uniform, 10, 0, 1) / uniform.numel()
    assert (deciles - 0.1).abs().max() < 5 * math.sqrt(0.09 / uniform.numel())
    assert (torch.corrcoef(rows) - torch.eye(4)).abs().max() < 5 / math.sqrt(50_000)
