"""The draw: the right distribution, and a function of nothing but its own row."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree.kernels.noise import KeyedNoise
from ddtree.verifier import sampling
from ddtree.verifier.batch import SamplingRows
from ddtree.verifier.sampling import sample


def rows(temperature: list[float], top_p: list[float], top_k: list[int], seed: list[int]) -> SamplingRows:
    return SamplingRows(
        row=torch.arange(len(seed), dtype=torch.int32),
        temperature=torch.tensor(temperature),
        top_p=torch.tensor(top_p),
        top_k=torch.tensor(top_k, dtype=torch.int32),
        seed=torch.tensor(seed, dtype=torch.int64),
    )


def same(n: int, temperature: float, top_p: float = 1.0, top_k: int = 0, seed: int = 0) -> SamplingRows:
    return rows([temperature] * n, [top_p] * n, [top_k] * n, [seed] * n)


def probabilities(logits: list[float], temperature: float, top_p: float, top_k: int, min_p: float = 0.0) -> list[float]:
    """The distribution to draw from, in plain Python and by the definition."""
    x = [v / temperature for v in logits]
    x = [v if math.exp(v - max(x)) >= min_p else -math.inf for v in x]
    if 0 < top_k < len(x):
        kth = sorted(x, reverse=True)[top_k - 1]
        x = [v if v >= kth else -math.inf for v in x]
    mass = [math.exp(v - max(x)) for v in x]
    if top_p < 1:
        total = sum(mass)
        mass = [m if sum(o for o in mass if o > m) < top_p * total else 0.0 for m in mass]
    return [m / sum(mass) for m in mass]


PARAMETERS = [
    (1.0, 1.0, 0, 0.0),
    (0.7, 1.0, 0, 0.0),
    (1.0, 0.6, 0, 0.0),
    (1.3, 0.9, 5, 0.0),
    (1.0, 1.0, 3, 0.0),
    (2.0, 0.5, 7, 0.0),
    (1.0, 0.05, 0, 0.0),
    (0.5, 1.0, 99, 0.0),
    (1.0, 1.0, 0, 0.2),
    (0.7, 0.9, 0, 0.1),
    (1.5, 0.8, 4, 0.15),
    (2.0, 1.0, 8, 0.5),
    (1.0, 1.0, 0, 1.0),
]


@pytest.mark.parametrize(("temperature", "top_p", "top_k", "min_p"), PARAMETERS)
def test_frequencies_are_the_exact_probabilities(temperature: float, top_p: float, top_k: int, min_p: float) -> None:
    logits = [1.0, -0.5, 2.0, 0.3, 0.3, -3.0, 1.9, 0.0, 1.0]
    expected, n = torch.tensor(probabilities(logits, temperature, top_p, top_k, min_p)), 3_000
    draws = same(n, temperature, top_p, top_k)
    draws = replace(draws, seed=torch.arange(n) * 0x9E3779B97F4A7C1, min_p=torch.full((n,), min_p) if min_p else None)
    positions = torch.arange(n) % 5
    y = sample(torch.tensor(logits).expand(n, -1), positions, draws, KeyedNoise(len(logits), max_bytes=1))
    counts = torch.bincount(y.long(), minlength=len(logits)).double()
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = ((counts - n * expected)[kept] ** 2 / (n * expected)[kept]).sum()
    freedom = int(kept.sum()) - 1
    assert chi_square <= freedom + 4 * math.sqrt(2 * freedom) + 8  # p < 1e-4 for every freedom from 0 to 8


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_draw_keeps_to_the_kept_set(data: st.DataObject) -> None:
    """Logits on a coarse grid, so ties at every boundary."""
    vocab = data.draw(st.integers(1, 12))
    logits = [v / 4 for v in data.draw(st.lists(st.integers(-12, 12), min_size=vocab, max_size=vocab))]
    temperature, top_p = (
        data.draw(st.sampled_from([0.5, 1.0, 2.0])),
        data.draw(st.sampled_from([0.01, 0.3, 0.77, 0.999, 1.0])),
    )
    top_k = data.draw(st.integers(-1, vocab + 1))
    y = sample(
        torch.tensor([logits]), torch.tensor([3]), same(1, temperature, top_p, top_k, data.draw(st.integers(0, 99)))
    )
    assert probabilities(logits, temperature, top_p, top_k)[int(y)] > 0
    if top_k == 1:
        assert int(y) == logits.index(max(logits))


@pytest.mark.parametrize("params", [(0.0, 1.0, 0), (9e-6, 0.9, 0), (1.0, 0.0, 0), (1.0, 1.0, 1), (0.3, 0.5, 1)])
@pytest.mark.parametrize("vocab", [7, 256, 1024])
def test_greedy_takes_the_lowest_of_the_tied(params: tuple[float, float, int], vocab: int) -> None:
    logits = torch.randint(0, 3, (64, vocab), generator=torch.Generator().manual_seed(1)).bfloat16()
    y = sample(logits, torch.arange(64), same(64, *params))
    assert y.tolist() == [row.index(max(row)) for row in logits.tolist()] and y.dtype == torch.int32


def random_batch(n: int, vocab: int, seed: int) -> tuple[Tensor, Tensor, SamplingRows]:
    """Rows of every kind, from peaked to flat, many with the key of another."""
    g = torch.Generator().manual_seed(seed)

    def pick(values: list[float]) -> list[float]:
        return [values[i] for i in torch.randint(len(values), (n,), generator=g).tolist()]

    scale = torch.tensor(pick([0.01, 1.0, 4.0]))[:, None]
    logits = (torch.randn(n, vocab, generator=g) * scale).bfloat16()
    params = rows(
        pick([0.0, 0.6, 1.0, 1.5]),
        pick([0.0, 0.5, 0.95, 1.0, 1.0]),
        [int(k) for k in pick([0, 1, 40, 300])],
        [int(s) for s in pick([0, 1, -7, 2**62])],
    )
    return logits, torch.randint(5, (n,), generator=g), params


@pytest.mark.parametrize("vocab", [300, 6000])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_draw_depends_on_its_own_row_only(vocab: int, seed: int) -> None:
    """Alone, in any order, with a cold, warm or overflowing cache: the same tokens."""
    logits, positions, params = random_batch(48, vocab, seed)
    warm = KeyedNoise(vocab)
    together = sample(logits, positions, params, warm)
    assert torch.equal(sample(logits, positions, params, warm), together)
    assert torch.equal(sample(logits, positions, params, KeyedNoise(vocab, max_bytes=1)), together)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(seed))
    for part in (order, *order.split(7), *order.split(1)):
        own = SamplingRows(**{k: v if v is None else v[part] for k, v in vars(params).items()})
        assert torch.equal(sample(logits[part], positions[part], own), together[part])


def test_flat_rows_are_truncated_as_peaked_ones_are() -> None:
    """More kept tokens than the largest head that is looked at before everything is sorted."""
    vocab, n = 5_000, 150
    logits = torch.zeros(n, vocab)
    logits[:, ::2] -= 0.001  # half of the tokens a little lower
    draws = replace(same(n, 1.0, top_p=0.5), seed=torch.arange(n))
    y = sample(logits, torch.zeros(n, dtype=torch.long), draws)
    assert (y % 2 == 1).all() and y.unique().numel() > 0.9 * n
    draws = replace(same(n, 1.0, top_p=0.51), seed=torch.arange(n))
    assert 0.3 < (sample(logits, torch.zeros(n, dtype=torch.long), draws) % 2).float().mean() < 0.7


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [(0.0, 1.0, 0), (1.0, 1.0, 0), (1.0, 0.9, 3)])
def test_a_row_that_is_not_finite_gives_minus_one(value: float, params: tuple[float, float, int]) -> None:
    logits = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    clean = sample(logits, torch.arange(3), same(3, *params))
    logits[1, 300] = value
    y = sample(logits, torch.arange(3), same(3, *params))
    assert y[1] == -1 and y[[0, 2]].tolist() == clean[[0, 2]].tolist()


def test_no_rows_give_no_tokens() -> None:
    y = sample(torch.empty(0, 10), torch.empty(0, dtype=torch.int32), same(0, 1.0))
    assert y.shape == (0,) and y.dtype == torch.int32


def test_neighbouring_positions_and_seeds_draw_differently() -> None:
    logits = torch.zeros(4, 40_000)
    y = sample(logits, torch.tensor([5, 6, 5, 6]), rows([1.0] * 4, [1.0] * 4, [0] * 4, [1, 1, 2, 2]))
    assert y.unique().numel() == 4


@pytest.mark.parametrize("vocab", [7, 300, 6000])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("min_p", [False, True])
def test_rows_drawn_at_once_are_those_drawn_one_by_one(vocab: int, seed: int, min_p: bool) -> None:
    """What a GPU runs."""
    logits, positions, params = random_batch(60, vocab, seed)
    logits[5, 3] = math.nan
    if min_p:
        kept = torch.rand(60, generator=torch.Generator().manual_seed(seed)) / 10
        params = replace(params, min_p=kept.where(torch.arange(60) % 3 > 0, 0.0))
    expected = sample(logits, positions, params)
    got = sampling._at_once(logits.float(), positions, params, KeyedNoise(vocab))
    assert got.dtype == expected.dtype and torch.equal(got, expected)
