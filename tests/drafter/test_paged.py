"""Paged contexts against contexts that grow one by one, and what only a pool, padding and graphs can get wrong."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.drafter.config import DrafterConfig
from ddtree.drafter.drafter import ContextFull, Drafter, DraftItem, FeatureSlice
from ddtree.drafter.pages import FreePages

from ..kernels.emulation import compiler, emulated

POSITIONS, WIDTH, NAMES = 400, 96, "abcdefg"
FEATURES = torch.randn(POSITIONS, WIDTH, generator=torch.Generator().manual_seed(0))
Make = Callable[..., Drafter]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a CUDA device")


@pytest.fixture(scope="module")
def target(target_dir: Callable[..., Path]) -> Path:
    return target_dir()


@pytest.fixture(scope="module")
def checkpoint(config: DrafterConfig, drafter_dir: Callable[..., Path]) -> Callable[..., Path]:
    """Changes to the config → a checkpoint whose sequences have up to seven pages."""
    return lambda **changes: drafter_dir(dataclasses.replace(config, max_positions=POSITIONS, **changes))


@pytest.fixture(scope="module")
def make(checkpoint: Callable[..., Path], target: Path) -> Make:
    """Arguments of `Drafter` → one in fp32 on the CPU unless they say otherwise; it is paged for up to 6 sequences."""
    plain = checkpoint()

    def drafter(directory: Path = plain, **arguments: object) -> Drafter:
        usual = {"dtype": torch.float32, "top_k": 7, "paged": True, "context_tokens": 64 * 64, "max_sequences": 6}
        return Drafter(directory, target, **{**usual, **arguments})

    return drafter


@dataclasses.dataclass(frozen=True)
class Pair:
    """The same model twice, the second with contexts that grow one by one in fp32."""

    paged: Drafter
    growing: Drafter
    tolerance: float
    most_calls: int = 6  # of a random schedule

    def draft(self, items: list[DraftItem]) -> None:
        """Both drafters give the same candidates."""
        a, b = (each.draft(items, [FEATURES]) for each in (self.paged, self.growing))
        assert a.logprobs.shape == b.logprobs.shape and a.ids.shape == b.ids.shape
        torch.testing.assert_close(a.logprobs.cpu(), b.logprobs, atol=self.tolerance, rtol=self.tolerance)
        if self.tolerance < 1e-4:
            assert (a.ids.cpu() == b.ids).float().mean() > 0.95 if len(b.ids) else True  # ties apart

    def release(self, names: str) -> None:
        for each in (self.paged, self.growing):
            each.release(names)


@pytest.fixture(scope="module", params=["reference", "kernels"])
def pair(request: pytest.FixtureRequest, make: Make, checkpoint: Callable[..., Path], device: str) -> Iterator[Pair]:
    """In fp32, which runs on the reference, and in fp16 on the CUDA sources: emulated, or as graphs on a GPU."""
    if request.param == "reference":
        yield Pair(make(device=device), make(paged=False), 1e-5)
        return
    if device == "cpu" and compiler() is None:
        pytest.skip("the emulator needs g++ 12")
    wide = checkpoint(head_dim=64)
    with emulated() if device == "cpu" else nullcontext():
        paged = make(wide, device=device, dtype=torch.float16)
        yield Pair(paged, make(wide, paged=False), 0.06, most_calls=1 if device == "cpu" else 6)


def grow(name: str, held: int, rows: int, bonus: int | None) -> DraftItem:
    """The next rows of a sequence that holds `held`; the features of position p are row p of FEATURES."""
    part = FeatureSlice(0, list(range(held, held + rows)), held)
    return DraftItem(name, held == 0, [part] if rows else [], bonus, held + rows)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_calls_equal_growing_contexts(pair: Pair, data: st.DataObject) -> None:
    """Ragged batches, prompts of several pages, restarts, feeding only, and pages that pass from one to another."""
    pair.release(NAMES)
    held = dict.fromkeys(NAMES, 0)
    for _ in range(data.draw(st.integers(1, pair.most_calls))):
        items = []
        for name in data.draw(st.permutations(NAMES))[: data.draw(st.integers(1, 6))]:
            if data.draw(st.integers(0, 9)) == 0:
                held[name] = 0
            rows = data.draw(st.integers(0, 5) | st.integers(0, 5) | st.integers(0, 5) | st.integers(0, 150))
            rows = min(rows, POSITIONS - held[name])
            fits = pair.paged.info.drafts_at(held[name] + rows)
            items.append(grow(name, held[name], rows, data.draw(st.none() | st.integers(0, 96)) if fits else None))
            held[name] += rows
        pair.draft(items)
        leaving = data.draw(st.lists(st.sampled_from(NAMES), max_size=2))
        pair.release("".join(leaving))
        held |= dict.fromkeys(leaving, 0)
    pair.release(NAMES)
    assert len(pair.paged._contexts._free) == 64


def test_padding_touches_nobody(pair: Pair) -> None:
    """A pass for four, then one for one in a smaller bucket, and one for three in the first again."""
    pair.release(NAMES)
    pair.draft([grow(name, 0, 60 + i, 5) for i, name in enumerate("abcd")])
    pair.draft([grow("b", 61, 4, 7)])
    pair.draft([grow("a", 60, 5, 7), grow("c", 62, 1, 8), grow("d", 63, 3, 9)])
    pair.draft([grow(name, held, 2, 3) for name, held in zip("abcd", (65, 65, 63, 66), strict=True)])


def test_a_block_longer_than_a_page(make: Make, checkpoint: Callable[..., Path], device: str) -> None:
    long = checkpoint(block_size=70)
    pair = Pair(make(long, device=device), make(long, paged=False), 1e-5)
    pair.draft([grow(name, 0, 60 + i, 5) for i, name in enumerate("abc")])
    pair.draft([grow("b", 61, 30, 7)])


def test_a_full_pool_changes_nothing(make: Make, device: str) -> None:
    """Neither for those it had room for in the same call; a restart keeps its old pages until it succeeds."""
    pair = Pair(make(device=device, context_tokens=4 * 64), make(paged=False), 1e-5)
    pair.draft([grow("a", 0, 60, None), grow("b", 0, 50, 3)])
    calls = [
        [grow("a", 60, 1, 4), grow("c", 0, 130, 5)],
        [grow("a", 60, 200, None)],
        [grow("c", 0, 1, 5), grow("a", 0, 125, 4)],
    ]
    for items in calls:
        with pytest.raises(ContextFull, match=r"need \d more pages of 64 tokens, 2 of 4 are free"):
            pair.paged.draft(items, [FEATURES])
        assert pair.paged.sequences == 2
    pair.draft([grow("b", 50, 3, 3), grow("a", 60, 5, 4)])
    pair.release("b")
    pair.draft([grow("c", 0, 80, 4), grow("a", 65, 2, 4)])


def test_a_failing_pass_gives_its_pages_back(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make()
    drafter.draft([grow("a", 0, 60, None)], [FEATURES])
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(drafter._contexts._stack, "_lm_head", torch.nn.Linear(31, 97))
        drafter.draft([grow("a", 60, 100, 3), grow("b", 0, 70, 3)], [FEATURES])
    assert len(drafter._contexts._free) == 63
    drafter.release(["a", "b"])
    assert len(drafter._contexts._free) == 64


@needs_gpu
def test_a_graph_equals_eager_bit_for_bit(make: Make, checkpoint: Callable[..., Path]) -> None:
    wide, arguments = checkpoint(head_dim=64), {"device": "cuda", "dtype": torch.bfloat16}
    graph, eager = make(wide, **arguments), make(wide, **arguments, graphs=False)
    assert graph._contexts._passes[0]._graph and not eager._contexts._passes[0]._graph
    held, generator = dict.fromkeys(NAMES, 0), torch.Generator().manual_seed(1)
    for _ in range(30):
        count = int(torch.randint(1, 7, (), generator=generator))
        names = [NAMES[i] for i in torch.randperm(7, generator=generator)[:count]]
        rows = {name: 20 if not held[name] else int(torch.randint(0, 7, (), generator=generator)) for name in names}
        items = [grow(name, held[name], n, 5) for name, n in rows.items()]
        held |= {name: held[name] + n for name, n in rows.items()}
        a, b = (each.draft(items, [FEATURES.cuda()]) for each in (graph, eager))
        assert torch.equal(a.logprobs, b.logprobs) and torch.equal(a.ids, b.ids)


@needs_gpu
def test_what_no_kernel_serves_runs_without_graphs(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ddtree.drafter"):
        drafter = make(device="cuda", dtype=torch.float32)
    assert "drafts run without CUDA graphs" in caplog.text
    assert drafter._contexts._passes[0]._graph is None


@needs_gpu
def test_a_window_is_not_paged(make: Make, sliding_config: DrafterConfig, drafter_dir: Callable[..., Path]) -> None:
    sliding = drafter_dir(sliding_config)
    pair = Pair(make(sliding, device="cuda", paged=None), make(sliding, paged=False), 1e-4)
    pair.draft([grow("a", 0, 20, 5), grow("b", 0, 3, 6)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"context_tokens": 63}, "6 sequences in 63 context tokens: give at least one sequence and 64 tokens"),
        ({"max_sequences": 0}, "0 sequences in 4096 context tokens"),
    ],
)
def test_sizes_without_room(make: Make, arguments: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(**arguments)


def test_a_window_is_refused(make: Make, sliding_config: DrafterConfig, drafter_dir: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="no layers with a sliding window"):
        make(drafter_dir(sliding_config))


def test_more_than_the_largest_call(make: Make) -> None:
    drafter = make()
    with pytest.raises(ValueError, match=r"at most 6 sequences \(max_sequences\)"):
        drafter.draft([grow(name, 0, 3, 5) for name in NAMES], [FEATURES])
    assert drafter.sequences == 0
    assert drafter.draft([grow(name, 0, 3, 5 if name < "g" else None) for name in NAMES], [FEATURES]).ids.shape[0] == 6


def test_free_pages() -> None:
    pages = FreePages(4, 64)
    taken = pages.take(3)
    with pytest.raises(ContextFull, match="need 2 more pages of 64 tokens, 1 of 4 are free"):
        pages.take(2)
    pages.give(taken)
    assert len(pages) == 4 and sorted(pages.take(4)) == [0, 1, 2, 3] and pages.take(0) == []


def test_features_from_several_tensors(make: Make, device: str) -> None:
    """In other dtypes and in any order of rows."""
    drafter = make(device=device)
    whole = drafter.draft([grow("a", 0, 300, 5)], [FEATURES.bfloat16()]).logprobs.clone()
    parts = [FeatureSlice(0, list(range(200)), 0), FeatureSlice(1, list(range(100)), 200)]
    split = drafter.draft([DraftItem("a", True, parts, 5, 300)], FEATURES.bfloat16().split(200))
    assert torch.equal(split.logprobs, whole)
    parts = [FeatureSlice(0, list(range(399, 199, -1)), 0), FeatureSlice(0, list(range(199, 99, -1)), 200)]
    backwards = drafter.draft([DraftItem("a", True, parts, 5, 300)], [FEATURES.bfloat16().flip(0)])
    assert torch.equal(backwards.logprobs, whole)
