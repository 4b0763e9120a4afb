"""Rounds walked offline: trials against whole trees, drafters that are always right, and the verifier's own draws."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from ddtree.drafter.config import DrafterConfig, Rope
from ddtree.drafter.dflash import DFlashModel
from ddtree.drafter.path_head import PathHead
from ddtree.drafter.training.acceptance import Ranking, Sample, measure, nested_depths, tally
from ddtree.drafter.training.decoder import Decoder, Job
from ddtree.drafter.training.ragged import Tokens
from ddtree.drafter.training.tallies import Cells, Trial
from ddtree.drafter.training.target import Target, causal
from ddtree.drafter.training.trainer import initialise
from ddtree.kernels.noise import KeyedNoise
from ddtree.verifier.batch import SamplingRows
from ddtree.verifier.sampling import sample as drawn

CELLS = Cells((0.1, 0.5), 8)
BUDGETS = (3, 8, 20)
HORIZON = 7


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Target:
    return Target(target_dir, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def model() -> DFlashModel:
    config = DrafterConfig(
        hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=400,
        num_target_layers=6, target_layer_ids=(1, 3), block_size=HORIZON + 1, mask_token_id=4, max_positions=256,
        rope=Rope(theta=1e4),
    )  # fmt: skip
    made = DFlashModel(config)
    initialise(made, torch.ones(32), 0)
    return made.eval()


def answers(target: Target, temperature: float = 0.0, count: int = 3) -> Iterator[Sample]:
    """Of prompts of random tokens; they stop nowhere."""
    rng, noise = np.random.default_rng(1), KeyedNoise(400)
    decoder = Decoder(target, (), slots=2, size=120, seed=0, keyed_noise=noise if temperature else None)
    jobs = [Job(i, rng.integers(5, 400, 10 + 5 * i), temperature, 40, 7 * i) for i in range(count)]
    for answer in decoder.generate(iter(jobs), float("inf"), wait_for_all=True):
        yield Sample("random", answer.tokens, len(answer.job.prompt), answer.job.seed)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), rank=st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_trials_are_the_children_of_accepted_nodes(seed: int, rank: list[int]) -> None:
    rng = np.random.default_rng(seed)
    logprobs = [sorted(np.log(rng.dirichlet(np.ones(4))).tolist(), reverse=True) for _ in range(3)]
    paths = (p for d in (1, 2, 3) for p in itertools.product(range(4), repeat=d))
    ranked = sorted(paths, key=lambda p: -math.fsum(logprobs[i][k] for i, k in enumerate(p)))
    tried: list[tuple[int, Trial]] = []
    depths = nested_depths(logprobs, rank, BUDGETS, tried)
    for budget in BUDGETS:
        met = [trial for nodes, trial in tried if nodes <= budget]
        wanted = [
            (len(p) - 1, logprobs[len(p) - 1][p[-1]], p[-1] == rank[len(p) - 1])
            for p in ranked[:budget]
            if list(p[:-1]) == rank[: len(p) - 1]
        ]
        assert sorted(met) == sorted(wanted)
        assert sum(hit for _, _, hit in met) == depths[budget]


def test_columns_are_consistent(target: Target, model: DFlashModel) -> None:
    for sample in answers(target):
        columns = tally(model, target, sample, BUDGETS, 30, cells=CELLS)
        assert list(columns) == ["chain", "3", "8", "20"]
        for column in columns.values():
            assert column.hits.sum() == column.accepted.sum()
            tokens = round(column.rounds * column.acceptance_length)
            assert 30 <= tokens < 30 + HORIZON + 1, "rounds cover the answer without gaps"
        assert columns["chain"].trials.sum() == columns["chain"].reached.sum(), "a chain has one node at each depth"
        table = measure(model, target, [sample], BUDGETS, 30)["random"]
        assert table["rounds"] == columns["chain"].rounds
        assert table["8"] == round(columns["8"].acceptance_length, 3)


@pytest.mark.parametrize("noise", [0.0, 0.65])
def test_a_path_head_that_adds_nothing_changes_nothing(target: Target, model: DFlashModel, noise: float) -> None:
    """Rounds by rows that are the same for every parent; one that does add something has rounds of its own, without gaps."""
    for sample in answers(target):
        generator = torch.Generator().manual_seed(0)
        rows = {"markov_w1.weight": torch.randn(400, 4, generator=generator), "markov_w2.weight": torch.zeros(400, 4)}
        head = PathHead(rows, vocab_size=400, hidden_size=32)
        plain = tally(model, target, sample, BUDGETS, 30, ranking=Ranking(16, noise), cells=CELLS)
        same = tally(model, target, sample, BUDGETS, 30, ranking=Ranking(16, noise, head), cells=CELLS)
        for name, column in plain.items():
            assert same[name].histogram.tolist() == column.histogram.tolist()
            assert same[name].trials.tolist() == column.trials.tolist()
            np.testing.assert_allclose(same[name].promised, column.promised, rtol=1e-4)
        rows["markov_w2.weight"].normal_(generator=generator)
        for column in tally(model, target, sample, BUDGETS, 30, ranking=Ranking(16, noise, head), cells=CELLS).values():
            assert column.hits.sum() == column.accepted.sum()
            assert 30 <= round(column.rounds * column.acceptance_length) < 30 + HORIZON + 1


class Oracle:
    """A drafter that knows what the target goes on to say; for a target whose lm_head is a multiple of the identity."""

    def __init__(self, config: DrafterConfig, tokens: Tokens) -> None:
        self.config, self.tokens = config, torch.from_numpy(tokens.astype(np.int64))

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def __call__(self, block: Tensor, positions: Tensor, *_: Tensor) -> Tensor:
        return F.one_hot(self.tokens[positions.clamp(max=len(self.tokens) - 1)], 400).float()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_knows_the_answer_gets_the_full_length(
    target: Target, model: DFlashModel, temperature: float
) -> None:
    for sample in answers(target, temperature):
        seen = copy.copy(target)
        seen.head = 50 * torch.eye(400)
        oracle: Any = Oracle(model.config, sample.tokens)
        columns = tally(oracle, seen, sample, (HORIZON, 20), 24, ranking=Ranking(noise=0.65 * temperature), cells=CELLS)
        for column in columns.values():
            assert column.acceptance_length == HORIZON + 1
            assert column.histogram.tolist() == [0] * HORIZON + [3]
            assert column.reached.tolist() == column.accepted.tolist() == [3] * HORIZON
        assert columns["chain"].calibration_error() < 1e-3


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_answers_are_drawn_as_the_verifier_draws(target: Target, temperature: float) -> None:
    for answer in answers(target, temperature):
        ids, start = torch.from_numpy(answer.tokens)[None], answer.prompt_length
        hidden = target.hidden(ids, torch.arange(ids.shape[1])[None], causal)
        logits, count = (hidden @ target.head.T)[0, start - 1 : -1], ids.shape[1] - start
        rows = SamplingRows(
            row=torch.arange(count, dtype=torch.int32),
            temperature=torch.full((count,), temperature),
            top_p=torch.ones(count),
            top_k=torch.zeros(count, dtype=torch.int32),
            seed=torch.full((count,), answer.seed),
        )
        wanted = drawn(logits, torch.arange(start, ids.shape[1]), rows)
        assert answer.tokens[start:].tolist() == wanted.tolist()


def test_the_targets_noise_raises_what_draws_accept(target: Target, model: DFlashModel) -> None:
    """A drafter that knows nothing still gains: much of a draw at temperature 1 is the noise."""
    plain = shared = 0.0
    for sample in answers(target, 1.0, count=4):
        plain += tally(model, target, sample, (20,), 30)["20"].acceptance_length
        shared += tally(model, target, sample, (20,), 30, ranking=Ranking(400, 1.0))["20"].acceptance_length
    assert shared > plain
