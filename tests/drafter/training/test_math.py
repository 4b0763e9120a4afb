"""Masks, packing, optimiser, losses and trees: each against its definition."""

from __future__ import annotations

import copy
import itertools
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ddtree.drafter.config import DrafterConfig, Rope
from ddtree.drafter.dflash import DFlashModel
from ddtree.drafter.training import ops
from ddtree.drafter.training.acceptance import nested_depths, nested_path_depths
from ddtree.drafter.training.answers import Answers, AnswerStore, Source
from ddtree.drafter.training.masks import AnchorMask, DocumentMask
from ddtree.drafter.training.muon import Optimiser, orthogonalise
from ddtree.drafter.training.rows import batch_index, pack_rows, sample_blocks, split
from ddtree.drafter.training.tallies import Trial
from ddtree.drafter.training.trainer import initialise, schedule

CPU = torch.device("cpu")
seeds = st.integers(0, 2**31)


def some_answers(seed: int, count: int, longest: int) -> Answers:
    rng, answers = np.random.default_rng(seed), Answers()
    for i in range(count):
        length = int(rng.integers(4, longest))
        tokens = rng.integers(5, 400, length).astype(np.uint16)
        answers.add(tokens, int(rng.integers(1, length - 1)), float(rng.choice([0.0, 1.0])), Source("code", i // 2, i))
    return answers


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_packing_loses_nothing_and_anchors_only_answers(seed: int) -> None:
    answers = some_answers(seed, 30, 100)
    rows = pack_rows(answers, range(30), 128, seed, CPU)
    documents = {}
    for r in range(len(rows)):
        for at in range(128):
            start, end = int(rows.start[r, at]), int(rows.end[r, at])
            assert start <= at < end
            if end - start > 1:
                documents[r, start] = rows.token[r, start:end].tolist()
    assert sorted(documents.values()) == sorted(t.tolist() for t in answers.tokens)
    anchors = sum(len(t) - p - 1 for t, p in zip(answers.tokens, answers.prompt_length, strict=True))
    assert int(rows.anchor.sum()) == anchors


@settings(max_examples=10, deadline=None)
@given(seed=seeds)
def test_tiles_cover_the_masks(seed: int) -> None:
    rows = pack_rows(some_answers(seed, 30, 250), range(30), 256, seed, CPU).take(torch.tensor([0, 1]))
    documents, packed = DocumentMask(2, 256, CPU), AnchorMask(2, 256, 16, 8, CPU)
    documents.start.copy_(rows.start)
    blocks = sample_blocks(rows, 16, 8, torch.Generator().manual_seed(seed))
    packed.anchor.copy_(torch.where(blocks.used, blocks.anchor, 0))
    packed.start.copy_(torch.where(blocks.used, blocks.start, 0))
    for mask in (documents, packed):
        dense = mask.dense()[:, 0]
        assert bool(dense.any(-1).all()), "a query that sees nothing would be NaN"
        wanted = dense.unflatten(1, (-1, 128)).unflatten(-1, (-1, 128)).any(2).any(-1)
        assert not bool((wanted & ~mask.tiles()).any())


def test_packed_block_equals_a_lone_one() -> None:
    """Neither the other blocks, nor other documents, nor the context after the anchor change a block."""
    torch.manual_seed(0)
    config = DrafterConfig(
        hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=400,
        num_target_layers=6, target_layer_ids=(1, 3), block_size=8, mask_token_id=4, max_positions=512,
        rope=Rope(theta=1e4),
    )  # fmt: skip
    model = DFlashModel(config)
    initialise(model, torch.rand(32), 0)
    rows = pack_rows(some_answers(3, 30, 120), range(30), 256, 0, CPU).take(torch.tensor([0, 1]))
    blocks = sample_blocks(rows, 16, 8, torch.Generator().manual_seed(0))
    mask = AnchorMask(2, 256, 16, 8, CPU)
    mask.anchor.copy_(torch.where(blocks.used, blocks.anchor, 0))
    mask.start.copy_(torch.where(blocks.used, blocks.start, 0))
    features, slots = torch.randn(2, 256, 64), torch.randn(2, 16 * 8, 32)
    position = torch.arange(256) - rows.start
    context = model.fuse(features)
    packed = model(slots, blocks.position.flatten(1), context, position, mask.dense()).view(2, 16, 8, 32)
    for b, a in ((0, 3), (1, 9), (1, 15)):
        assert bool(blocks.used[b, a])
        lo, at = int(blocks.start[b, a]), int(blocks.anchor[b, a])
        block = slots[b : b + 1].view(1, 16, 8, 32)[:, a]
        own = torch.arange(at - lo, at - lo + 8)[None]
        alone = model(block, own, context[b : b + 1, lo:at], torch.arange(at - lo)[None])
        torch.testing.assert_close(packed[b, a], alone[0], atol=1e-5, rtol=1e-4)


@settings(max_examples=20, deadline=None)
@given(seed=seeds, shape=st.sampled_from([(32, 32), (16, 48), (48, 16)]))
def test_muon_updates_are_nearly_orthogonal(seed: int, shape: tuple[int, int]) -> None:
    stack = torch.randn(3, *shape, generator=torch.Generator().manual_seed(seed))
    singular = torch.linalg.svdvals(orthogonalise(stack))
    assert float(singular.max()) < 1.3 and float(singular.median()) > 0.6


def test_optimiser_learns_and_restores_exactly() -> None:
    torch.manual_seed(0)
    wanted = torch.randn(8, 8)

    def step(model: nn.Module, optimiser: Optimiser, x: torch.Tensor) -> float:
        loss = (model(x) - x @ wanted.T).square().mean()
        loss.backward()
        optimiser.step(1.0)
        return loss.item()

    def made() -> tuple[nn.Module, Optimiser]:
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.LayerNorm(8, bias=False), nn.Linear(8, 8, bias=False))
        return model, Optimiser(model.parameters(), 0.02, 1e-3, 0.01)

    model, optimiser = made()
    batches = [torch.randn(16, 8) for _ in range(60)]
    losses = [step(model, optimiser, x) for x in batches]
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
    other, again = made()
    again.restore(copy.deepcopy(optimiser.state()))
    for x in batches[:3]:
        assert step(model, optimiser, x) == step(other, again, x)


def test_schedule_rises_then_falls() -> None:
    points = [schedule(x / 100, 0.03) for x in range(101)]
    assert points[0] > 0 and max(points) <= 1.0 and points[-1] == pytest.approx(0.02)
    assert points[:3] == sorted(points[:3]) and points[4:] == sorted(points[4:], reverse=True)


def test_a_pass_takes_every_row_once_and_resumes_anywhere() -> None:
    first = torch.cat([batch_index(12, 4, step, 5) for step in range(3)])
    second = torch.cat([batch_index(12, 4, step, 5) for step in range(3, 6)])
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(12))
    assert first.tolist() != second.tolist()


def test_split_keeps_variants_together() -> None:
    answers = some_answers(0, 40, 20)
    train, validation = split(answers, 5)
    groups = [{answers.group[i] for i in side} for side in (train, validation)]
    assert not groups[0] & groups[1] and len(train) + len(validation) == 40


def test_cross_entropy_gradient_is_autograds() -> None:
    torch.manual_seed(0)
    logits, teacher = torch.randn(5, 50), torch.randn(3, 50)
    row, label = torch.tensor([0, 2, 1, 1, 0], dtype=torch.int32), torch.randint(0, 50, (5,))
    weight, soft = torch.rand(5), torch.tensor([0.0, 1.0, 0.5, 0.0, 1.0])
    x = logits.clone().requires_grad_()
    target = soft[:, None] * teacher.softmax(-1)[row.long()]
    target = target + (1 - soft)[:, None] * nn.functional.one_hot(label, 50)
    wanted = -(target * x.log_softmax(-1)).sum(-1) * weight
    wanted.sum().backward()
    loss, hit = ops.cross_entropy_(logits, teacher, ops.row_logsumexp(teacher), row, label, weight, soft)
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(logits, x.grad)
    assert hit.tolist() == (x.argmax(-1) == label).float().tolist()


def test_gumbel_argmax_draws_the_distribution() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().repeat(4000, 1)
    drawn = ops.gumbel_argmax(logits, torch.ones(4000), torch.tensor([3]))
    assert (drawn.bincount(minlength=3) / 4000 - torch.tensor([0.5, 0.3, 0.2])).abs().max() < 0.03
    assert ops.gumbel_argmax(logits, torch.zeros(4000), torch.tensor([3])).eq(0).all()


@settings(max_examples=60, deadline=None)
@given(seed=seeds, data=st.data())
def test_trees_accept_as_brute_force(seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    logprobs = [sorted(np.log(rng.dirichlet(np.ones(4))).tolist(), reverse=True) for _ in range(3)]
    rank = data.draw(st.lists(st.integers(0, 4), min_size=3, max_size=3))
    paths = (p for d in (1, 2, 3) for p in itertools.product(range(4), repeat=d))
    ranked = sorted(paths, key=lambda p: -math.fsum(logprobs[i][k] for i, k in enumerate(p)))
    for budget, depth in nested_depths(logprobs, rank, (1, 3, 8, 20)).items():
        tree = set(ranked[:budget])
        assert depth == next((d for d in range(3) if tuple(rank[: d + 1]) not in tree), 3)


@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_trees_that_depend_on_paths_accept_what_the_kernel_has_in_them(seed: int) -> None:
    """And where no row depends on its parent, what those do that depend on none."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = torch.randn(3, 4, generator=generator).log_softmax(-1).sort(-1, descending=True).values
    rank = torch.randint(5, (3,), generator=generator).tolist()
    below, budgets = logprobs[1:, None].expand(-1, 4, -1).contiguous(), (1, 3, 8, 20, 90)
    assert nested_path_depths(logprobs[0], below, rank, budgets) == nested_depths(logprobs.tolist(), rank, budgets)
    below = torch.randn(2, 4, 4, generator=generator).log_softmax(-1)

    def cost(path: tuple[int, ...]) -> float:
        return -math.fsum(
            [float(logprobs[0, path[0]])] + [float(below[d, a, b]) for d, (a, b) in enumerate(pairwise(path))]
        )

    ranked = sorted((p for d in (1, 2, 3) for p in itertools.product(range(4), repeat=d)), key=cost)
    tried: list[tuple[int, Trial]] = []
    for budget, depth in nested_path_depths(logprobs[0], below, rank, budgets, tried).items():
        tree = set(ranked[:budget])
        trials = [trial for node, trial in tried if node <= budget]
        assert len(trials) == sum(list(path[:-1]) == rank[: len(path) - 1] for path in tree)
        assert sum(hit for *_, hit in trials) == depth
        assert depth == next((d for d in range(3) if tuple(rank[: d + 1]) not in tree), 3)


def test_answer_shards_add_up(tmp_path: Path) -> None:
    store, answers = AnswerStore(tmp_path / "a", np.uint16), some_answers(0, 6, 20)
    store.append(answers, 2.5)
    store.append(some_answers(1, 3, 20), 1.5)
    (tmp_path / "a" / "shard-0002.npz.partial.npz").write_bytes(b"cut off")
    loaded, seconds = store.load()
    assert len(loaded) == 9 and seconds == 4.0 and not store.finished
    assert [t.tolist() for t in loaded.tokens[:6]] == [t.tolist() for t in answers.tokens]
    assert loaded.temperature[:6] == answers.temperature and loaded.key[:6] == answers.key
