"""Steps of fixed size: padding has no effect, and a replayed graph is the forward that was recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ddtree.kernels import Rows
from ddtree.verifier.batch import Commit, LogprobRows, VerifyBatch
from ddtree.verifier.graphs import FixedBatch, StepSizes, row_buckets
from ddtree.verifier.hf import HFTarget
from ddtree.verifier.memory import MemoryShare
from ddtree.verifier.transfer import to_device

from .conftest import PAGE, Harness, Piece
from .test_hf import PROMPT, prompted, random_paths

SIZES = StepSizes(sequences=5, rows=96, pages=40, words=3, path=6)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: graphs exist on no other")


@given(st.integers(1, 5000), st.data())
def test_buckets_are_never_much_larger_than_what_they_hold(most: int, data: st.DataObject) -> None:
    buckets = row_buckets(most)
    assert buckets == sorted(set(buckets)) and buckets[-1] == most
    rows = data.draw(st.integers(1, most))
    bucket = next(size for size in buckets if size >= rows)
    assert bucket <= max(rows * 2 - 1, 1) and (rows < 8 or bucket <= 1.5 * rows)


def mixed(h: Harness, seed: int) -> list[Piece]:
    """Two trees and a prompt chunk."""
    generator = torch.Generator().manual_seed(seed)
    a, b = prompted(h, PROMPT), prompted(h, PROMPT[:3])
    return [
        h.random_tree(a.sequence, 5, 12, generator),
        h.random_tree(b.sequence, 6, 3, generator),
        Piece(h.sequence(32), PROMPT[::-1]),
    ]


def filled(fixed: FixedBatch, batch: VerifyBatch, rows: int) -> None:
    for own, late in fixed.fill(batch, rows):
        own.copy_(late)


def real_rows(batch: VerifyBatch) -> list[int]:
    """Indices of the rows in use; what the others come to is nobody's business."""
    offsets, lengths = batch.rows.row_offsets.tolist(), batch.rows.q_len.tolist()
    return [offsets[s] + i for s, n in enumerate(lengths) for i in range(n)]


@pytest.mark.parametrize("rows", [26, 32, 96])
def test_padding_changes_nothing(tiny: Harness, rows: int) -> None:
    target = tiny.target
    fixed = FixedBatch(SIZES, PAGE, tiny.trash * PAGE, target.device)
    for seed in range(3):  # what a step leaves behind must not reach the next one
        pieces = mixed(tiny, seed)
        batch = to_device(tiny.batch(*pieces), target.device)
        before = target.pool.k.clone()
        with torch.inference_mode():
            hidden, features = target.forward(batch.tokens, batch.positions, batch.slots, batch.rows)
            alone = target.pool.k.clone()
            target.pool.k.copy_(before)
            filled(fixed, batch, rows)
            padded_hidden, padded_features = target.forward(*fixed.first(rows))
        keep, page = real_rows(batch), [p for p in range(target.pool.pages) if p != tiny.trash]
        torch.testing.assert_close(padded_hidden[keep], hidden[keep], atol=5e-5, rtol=0)
        torch.testing.assert_close(padded_features[keep], features[keep], atol=5e-5, rtol=0)
        torch.testing.assert_close(target.pool.k[:, page], alone[:, page], atol=5e-5, rtol=0)
        tiny.release(*(piece.sequence for piece in pieces))


def after_a_round(h: Harness, seed: int) -> VerifyBatch:
    """Trees whose sequences have accepted paths of other trees to commit first."""
    generator = torch.Generator().manual_seed(seed)
    *trees, chunk = mixed(h, seed)
    h.step(*trees, chunk)
    commit = h.commit(trees, random_paths(trees, generator))
    batch = h.batch(*(h.random_tree(tree.sequence, 7, 9, generator) for tree in trees), commit=commit)
    h.release(*(piece.sequence for piece in (*trees, chunk)))  # nobody else takes their pages in these tests
    return batch


def test_paths_are_committed_and_padding_is_none(tiny: Harness) -> None:
    pool = tiny.target.pool
    fixed = FixedBatch(SIZES, PAGE, tiny.trash * PAGE, pool.device)
    batch = to_device(after_a_round(tiny, 3), pool.device)
    before = pool.k.clone()
    pool.commit(batch.commit)
    expected = pool.k.clone()
    assert not torch.equal(expected, before)
    pool.k.copy_(before)
    filled(fixed, batch, 64)
    pool.commit(fixed.commit())
    assert torch.equal(pool.k, expected)
    filled(fixed, dataclasses.replace(batch, commit=None), 64)
    pool.commit(fixed.commit())
    assert torch.equal(pool.k, expected)


def test_a_step_of_padding_alone_runs(tiny: Harness) -> None:
    fixed = FixedBatch(SIZES, PAGE, tiny.trash * PAGE, tiny.target.device)
    fixed.clear(8)
    with torch.inference_mode():
        hidden, _features = tiny.target.forward(*fixed.first(8))
    assert hidden.isfinite().all()


def test_a_larger_step_is_not_held() -> None:
    fixed = FixedBatch(StepSizes(sequences=1, rows=4, pages=2, words=1, path=3), PAGE, 0, torch.device("cpu"))

    def batch(rows: int = 4, sequences: int = 1, pages: int = 2, words: int = 1, path: int = 3) -> VerifyBatch:
        ints = torch.zeros(rows, dtype=torch.int32)
        spread = torch.zeros(sequences + 1, dtype=torch.int32)
        return VerifyBatch(
            ints,
            ints,
            ints.long(),
            Rows(
                row_offsets=spread,
                q_len=spread[1:],
                seq_len=spread[1:],
                page_table=torch.zeros(sequences, pages, dtype=torch.int32),
                page_size=PAGE,
                causal=spread[1:].bool(),
                ancestors=torch.zeros(rows, words, dtype=torch.int32),
            ),
            sampling=None,  # type: ignore[arg-type]
            commit=Commit(
                torch.zeros(sequences, pages, dtype=torch.int32),
                spread[1:],
                torch.zeros(sequences, path, dtype=torch.int32),
                spread[1:],
            ),
        )

    assert fixed.holds(batch())
    for larger in (batch(rows=5), batch(sequences=2), batch(pages=3), batch(words=2), batch(rows=0), batch(path=4)):
        assert not fixed.holds(larger)


def test_tensors_that_are_there_stay_where_they_are() -> None:
    @dataclass(frozen=True)
    class Inner:
        x: Tensor

    @dataclass(frozen=True)
    class Message:
        inner: Inner
        nothing: None
        number: int

    there = Message(Inner(torch.arange(3)), None, 4)
    assert to_device(there, torch.device("cpu")) is there
    moved = to_device(there, torch.device("meta"))
    assert moved.inner.x.device.type == "meta" and moved.inner.x.shape == (3,) and moved.number == 4


# -- on a GPU ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def wide(request: pytest.FixtureRequest, wide_dir: Callable[[str], Path]) -> HFTarget:
    """A tiny target on the GPU whose heads have a size that the CUDA kernels serve."""
    return HFTarget(
        wide_dir(request.param), dtype="bfloat16", device="cuda", page_size=PAGE, pages=64, feature_layers=(0, 2),
        graphs=SIZES,
    )  # fmt: skip


def check_replay(h: Harness) -> None:
    """Steps of mixed batches, replayed, are bit for bit what the forward gives over the same padded rows."""
    target, graphs = h.target, h.target._steps._graphs
    for seed in range(4):
        pieces = mixed(h, seed)
        batch = to_device(h.batch(*pieces), target.device)
        assert graphs.holds(batch)
        n = len(batch.tokens)
        rows = next(size for size in graphs._buckets if size >= n)
        filled(graphs._batch, batch, rows)
        hidden, features = target.forward(*graphs._batch.first(rows))
        keep = real_rows(batch)
        if seed % 2:  # what is on the device comes later, as where a batch is announced
            late = batch.tokens, batch.positions, batch.rows.ancestors, batch.rows.q_len
            right = [tensor.clone() for tensor in late]
            for tensor in late:
                tensor.zero_()
            graphs.prepare(batch)
            for tensor, numbers in zip(late, right, strict=True):
                tensor.copy_(numbers)
        output = graphs.run(batch)
        assert torch.equal(output.hidden[keep], hidden[:n][keep])
        assert torch.equal(output.features[keep], features[:n][keep])
        assert torch.equal(output.logits[keep], target.logits(hidden)[:n][keep])
        assert torch.equal(output.greedy[keep], output.logits[keep].float().argmax(-1).int())
        h.release(*(piece.sequence for piece in pieces))


@on_gpu
def test_a_prepared_step_is_the_same(wide: HFTarget) -> None:
    """As a device actor calls it: what is on the device comes after the announcement."""
    h = Harness(wide, None)
    for seed in range(4):
        pieces = mixed(h, seed)
        batch = h.batch(*pieces)
        late = dict(zip(("tokens", "positions"), to_device((batch.tokens, batch.positions), wide.device), strict=True))
        batch = dataclasses.replace(batch, **late)
        expected = wide.step(batch)
        torch.cuda.synchronize()
        y, features = expected.y.clone(), expected.features.clone()
        right = [tensor.clone() for tensor in late.values()]
        for tensor in late.values():
            tensor.zero_()
        again = dataclasses.replace(batch)
        wide.prepare(again)
        for tensor, number in zip(late.values(), right, strict=True):
            tensor.copy_(number)
        result = wide.step(again)
        keep = real_rows(batch)
        assert torch.equal(result.y[keep], y[keep]) and torch.equal(result.features[keep], features[keep])
        h.release(*(piece.sequence for piece in pieces))


@on_gpu
@torch.inference_mode()
def test_a_replayed_graph_commits(wide: HFTarget) -> None:
    h, graphs, pool = Harness(wide, None), wide._steps._graphs, wide.pool
    for seed in range(4):
        batch = to_device(after_a_round(h, seed), wide.device)
        n, before = len(batch.tokens), [cache.clone() for cache in pool.caches]
        rows = next(size for size in graphs._buckets if size >= n)
        pool.commit(batch.commit)
        filled(graphs._batch, batch, rows)
        _, features = wide.forward(*graphs._batch.first(rows))
        expected = [cache.clone() for cache in pool.caches]
        for cache, content in zip(pool.caches, before, strict=True):
            cache.copy_(content)
        output = graphs.run(batch)
        torch.cuda.synchronize()
        for cache, content in zip(pool.caches, expected, strict=True):
            assert torch.equal(cache[:, : h.trash], content[:, : h.trash])
        keep = real_rows(batch)
        assert torch.equal(output.features[keep], features[:n][keep])
        assert torch.equal(output.drawn, output.greedy.cpu())


@on_gpu
@torch.inference_mode()
def test_a_replayed_graph_equals_the_forward(wide: HFTarget) -> None:
    check_replay(Harness(wide, None))


@on_gpu
@pytest.mark.parametrize("rows", [9, SIZES.rows + 1])
def test_log_probabilities_of_a_replayed_graph(wide: HFTarget, rows: int) -> None:
    """Of the logits that the graph left, or of the step that ran without."""
    h, tokens = Harness(wide, None), [5 + i % 50 for i in range(rows)]
    piece = Piece(h.sequence(128), tokens)
    wanted = LogprobRows(
        torch.tensor([rows - 1]).int(), torch.arange(rows - 1).int(), torch.tensor(tokens[1:]).int(), 3
    )
    result = wide.step(dataclasses.replace(h.batch(piece), logprobs=wanted))
    torch.cuda.synchronize()
    with torch.inference_mode():
        features = result.features[:, -wide.info.hidden_size :]  # of the last layer: what the logits are of
        expected = wide.logits(features).float().log_softmax(-1).cpu()
    order = [rows - 1, *range(rows - 1)]
    assert result.logprobs is not None and result.logprobs.values.is_pinned()
    torch.testing.assert_close(
        result.logprobs.values, expected[order].gather(1, result.logprobs.ids.long()), atol=0.1, rtol=0
    )
    assert result.logprobs.ids[:, 0].tolist() == [int(result.drawn[-1]), *tokens[1:]]
    h.release(piece.sequence)


@on_gpu
def test_a_step_beyond_the_graphs_runs_without(wide: HFTarget) -> None:
    h = Harness(wide, None)
    long = Piece(h.sequence(128), [5 + i % 50 for i in range(SIZES.rows + 1)])
    [output] = h.step(long)
    h.release(long.sequence)
    assert len(output.y) == SIZES.rows + 1 and min(output.y) >= 0


@on_gpu
def test_a_pool_as_large_as_fits_leaves_room_for_every_step(wide_dir: Callable[[str], Path]) -> None:
    options = {"dtype": "bfloat16", "device": "cuda", "page_size": PAGE, "feature_layers": (0, 2), "graphs": SIZES}
    total = torch.cuda.get_device_properties(0).total_memory
    used = total - torch.cuda.mem_get_info()[0]
    target = HFTarget(
        wide_dir("llama"), pages=MemoryShare(fraction=0.5, others=1 << 30, others_per_token=512), **options
    )
    kept = 512 * target.pool.pages * PAGE
    taken = total - torch.cuda.mem_get_info()[0] - used
    assert 0.4 * total < target.pool.bytes + kept < 0.5 * total - (1 << 30)
    assert taken + kept < 0.5 * total
    with pytest.raises(ValueError, match=r"0 pages of 4 tokens fit .* lower target.max_context"):
        HFTarget(wide_dir("llama"), pages=MemoryShare(fraction=0.01, others=2 << 30), **options)


@on_gpu
def test_what_has_no_kernel_runs_without_graphs(
    wide_dir: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    target = HFTarget(wide_dir("llama"), dtype="float32", device="cuda", page_size=PAGE, pages=64, graphs=SIZES)
    assert "steps run without CUDA graphs" in caplog.text
    h = Harness(target, None)
    [output] = h.step(Piece(h.sequence(16), PROMPT))
    assert min(output.y) >= 0
