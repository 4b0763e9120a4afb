"""The cached, ragged drafter against one uncached pass of the model, and the ways a call can be wrong.

All of it on each device, with contexts that grow one by one and with paged ones.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from ddtree.drafter.checkpoint import load_published
from ddtree.drafter.config import DrafterConfig, DrafterInfo, Rope
from ddtree.drafter.dflash import DFlashModel
from ddtree.drafter.drafter import Candidates, Drafter, DraftItem, FeatureSlice
from ddtree.drafter.target_ends import TargetEnds

WIDTH, TOP_K, MASK = 96, 7, 16
Make = Callable[..., Drafter]
OneShot = Callable[[Drafter, Tensor, int, int], Tensor]


@pytest.fixture(scope="module")
def target(target_dir: Callable[..., Path]) -> Path:
    return target_dir()


@pytest.fixture(scope="module", params=["growing", "paged"])
def make(request: pytest.FixtureRequest, target: Path, device: str) -> Make:
    """A checkpoint directory → a drafter in fp32. Sliding layers are never paged."""

    def drafter(checkpoint_dir: Path, top_k: int = TOP_K, dtype: torch.dtype = torch.float32) -> Drafter:
        windows = any(span.window is not None for span in DrafterInfo.read(checkpoint_dir).spans)
        paged = request.param == "paged" and not windows
        return Drafter(checkpoint_dir, target, device=device, dtype=dtype, top_k=top_k, paged=paged)

    return drafter


@pytest.fixture(scope="module", params=["full", "sliding", "yarn", "causal"])
def drafter(
    request: pytest.FixtureRequest,
    config: DrafterConfig,
    sliding_config: DrafterConfig,
    drafter_dir: Callable[..., Path],
    make: Make,
) -> Drafter:
    if request.param == "causal":
        return make(drafter_dir(config, is_causal=True))
    yarn = dataclasses.replace(config, rope=Rope(1e4, "yarn", 8.0, 16))
    return make(drafter_dir({"full": config, "sliding": sliding_config, "yarn": yarn}[request.param]))


@pytest.fixture
def fresh(config: DrafterConfig, drafter_dir: Callable[..., Path], make: Make) -> Drafter:
    return make(drafter_dir(config))


def feats(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def feed(sequence: str, rows: int, *, bonus: int | None = 3, start: int = 0, source: int = 0) -> DraftItem:
    """A restart with rows 0 … of one source."""
    return DraftItem(sequence, True, [FeatureSlice(source, list(range(rows)), start)], bonus, start + rows)


@pytest.fixture(scope="module")
def one_shot(target: Path) -> OneShot:
    """drafter, features, start, bonus → log-probs `[L, V]` of one uncached pass on the CPU over a whole context."""

    @functools.cache
    def parts(checkpoint_dir: Path) -> tuple[DFlashModel, TargetEnds]:
        ends = TargetEnds.load(target, DrafterInfo.read(checkpoint_dir), dtype=torch.float32, device="cpu")
        return load_published(checkpoint_dir, dtype=torch.float32), ends

    @torch.no_grad()
    def log_probs(drafter: Drafter, features: Tensor, start: int, bonus: int) -> Tensor:
        model, ends = parts(drafter.info.checkpoint_dir)
        block = torch.full((1, drafter.info.block_size), drafter.info.mask_token_id)
        block[0, 0] = bonus
        positions = start + torch.arange(len(features) + drafter.info.block_size)[None]
        before, after = positions[:, : len(features)], positions[:, len(features) :]
        hidden = model(F.embedding(block, ends.embedding), after, model.fuse(features[None]), before)
        return (hidden[0, 1:] @ ends.lm_head.T).log_softmax(-1)

    return log_probs


def assert_drafts(candidates: Candidates, row: int, expected: Tensor) -> None:
    """The candidates are the best of `expected`; ids may differ only between equal log-probs."""
    best, (logprobs, ids) = expected.topk(TOP_K).values, (x[row].cpu() for x in (candidates.logprobs, candidates.ids))
    torch.testing.assert_close(logprobs, best, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(expected.gather(1, ids.long()), best, atol=1e-4, rtol=1e-4)


@dataclass
class Held:
    """What the test knows of a sequence that the drafter holds."""

    start: int
    features: Tensor


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_schedule_equals_one_shot(drafter: Drafter, one_shot: OneShot, data: st.DataObject) -> None:
    """Sequences join, grow by random pieces from random tensors, restart, skip rounds and leave, batched at random."""
    drafter.release(["a", "b", "c", "d"])
    held: dict[str, Held] = {}
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(data.draw(st.integers(1, 6))):
        items, expected = [], []
        sources: list[list[Tensor]] = [[], []]
        for name in data.draw(st.permutations("abcd"))[: data.draw(st.integers(1, 4))]:
            restart = name not in held or data.draw(st.booleans())
            if restart:
                held[name] = Held(data.draw(st.integers(0, 20)), torch.empty(0, WIDTH))
            own = held[name]
            slices = []
            for rows in data.draw(st.lists(st.integers(1, 4), min_size=int(restart), max_size=3)):
                source, position = data.draw(st.integers(0, 1)), own.start + len(own.features)
                rows = min(rows, drafter.info.max_positions - position)
                new = torch.randn(rows, WIDTH, generator=generator)
                order = torch.randperm(rows, generator=generator).tolist()  # rows of a path are in no order
                first = sum(len(part) for part in sources[source])
                sources[source].append(new[torch.tensor(order)])
                slices.append(FeatureSlice(source, [first + order.index(i) for i in range(rows)], position))
                own.features = torch.cat([own.features, new])
            end = own.start + len(own.features)
            fits = drafter.info.drafts_at(end)
            bonus = data.draw(st.none() | st.integers(0, 96)) if fits else None
            items.append(DraftItem(name, restart, slices, bonus, end))
            if bonus is not None:
                expected.append(one_shot(drafter, own.features, own.start, bonus))
        candidates = drafter.draft(items, [torch.cat([torch.empty(0, WIDTH), *parts]) for parts in sources])
        assert candidates.logprobs.shape == candidates.ids.shape == (len(expected), 4, TOP_K)
        for row, reference in enumerate(expected):
            assert_drafts(candidates, row, reference)
        for name in data.draw(st.lists(st.sampled_from("abcd"), max_size=1)):
            drafter.release([name])
            held.pop(name, None)
        assert drafter.sequences == len(held)


def test_batched_equals_alone(drafter: Drafter) -> None:
    drafter.release("abc")
    lengths, features = [3, 30, 11], [feats(30, i) for i in range(3)]
    items = [feed(name, n, bonus=i + 5, source=i) for i, (name, n) in enumerate(zip("abc", lengths, strict=True))]
    together = drafter.draft(items, features)
    for i, item in enumerate(items):
        alone = drafter.draft([item], features)
        torch.testing.assert_close(alone.logprobs[0], together.logprobs[i], atol=1e-5, rtol=1e-5)
        assert torch.equal(alone.ids[0], together.ids[i])


def test_fewer_levels_are_the_first_of_all(drafter: Drafter) -> None:
    """Whatever is asked of others in the call; how many there are beyond those asked for is the drafter's affair."""
    drafter.release(None)
    items = [feed("a", 9), feed("b", 5)]
    whole = drafter.draft(items, [feats(9)])
    for levels in ((1, 1), (3, 2), (2, None)):
        asked = [item._replace(levels=n) for item, n in zip(items, levels, strict=True)]
        found = drafter.draft(asked, [feats(9)])
        there = found.ids.shape[1]
        assert there >= max(n or drafter.info.horizon for n in levels)
        assert torch.equal(found.ids, whole.ids[:, :there])
        torch.testing.assert_close(found.logprobs, whole.logprobs[:, :there], atol=1e-5, rtol=1e-5)


def test_a_name_used_again_remembers_nothing(fresh: Drafter) -> None:
    """Drafter state of a slot reused by the next request, after a release and after a bare restart."""
    clean = fresh.draft([feed("s", 9)], [feats(9, 1)])
    fresh.draft([feed("s", 40)], [feats(40, 2)])
    restarted = fresh.draft([feed("s", 9)], [feats(9, 1)])
    fresh.release(["s"])
    assert fresh.sequences == 0
    released = fresh.draft([feed("s", 9)], [feats(9, 1)])
    for again in (restarted, released):
        assert torch.equal(again.ids, clean.ids) and torch.equal(again.logprobs, clean.logprobs)


def test_a_context_grows_past_its_first_allocation(
    config: DrafterConfig, drafter_dir: Callable[..., Path], make: Make, one_shot: OneShot
) -> None:
    drafter = make(drafter_dir(dataclasses.replace(config, max_positions=4096)))
    features = feats(1000)
    drafter.draft([feed("s", 250, bonus=None)], [features])
    for end in range(500, 1001, 250):
        rows = FeatureSlice(0, list(range(end - 250, end)), end - 250)
        candidates = drafter.draft([DraftItem("s", False, [rows], 8, end)], [features])
        assert_drafts(candidates, 0, one_shot(drafter, features[:end], 0, 8))


def test_the_bonus_token_is_in_slot_0(fresh: Drafter) -> None:
    drafts = [fresh.draft([feed("s", 9, bonus=token)], [feats(9)]) for token in (3, 4, MASK)]
    assert not torch.allclose(drafts[0].logprobs, drafts[1].logprobs)
    assert not torch.allclose(drafts[0].logprobs, drafts[2].logprobs)


def test_a_real_token_equal_to_the_mask_survives(fresh: Drafter, make: Make, one_shot: OneShot) -> None:
    """As the bonus, and among the candidates."""
    everything = make(fresh.info.checkpoint_dir, top_k=10_000)
    for drafter in (fresh, everything):
        candidates = drafter.draft([feed("s", 9, bonus=MASK)], [feats(9)])
        expected = one_shot(drafter, feats(9), 0, MASK)
        best = expected.topk(candidates.ids.shape[-1]).values
        torch.testing.assert_close(candidates.logprobs[0].cpu(), best, atol=1e-4, rtol=1e-4)
    assert candidates.ids.shape == (1, 4, 97) and (candidates.ids == MASK).sum() == 4


def test_lost_context_changes_the_draft(fresh: Drafter, one_shot: OneShot) -> None:
    """A prefix-cache hit without its features is a shorter context, not a wrong position: rows keep their positions."""
    features = feats(31)
    tail = DraftItem("s", True, [FeatureSlice(0, list(range(20, 30)), 20)], 5, 30)
    candidates = fresh.draft([tail], [features])
    assert_drafts(candidates, 0, one_shot(fresh, features[20:30], 20, 5))
    on = fresh.draft([DraftItem("s", False, [FeatureSlice(0, [30], 30)], 6, 31)], [features])
    assert_drafts(on, 0, one_shot(fresh, features[20:], 20, 6))
    whole = fresh.draft([feed("s", 30, bonus=5)], [features])
    assert not torch.allclose(whole.logprobs, candidates.logprobs)


def test_only_feeding_drafts_nothing(fresh: Drafter) -> None:
    candidates = fresh.draft([feed("s", 9, bonus=None)], [feats(9)])
    assert candidates.logprobs.shape == candidates.ids.shape == (0, 4, TOP_K)
    assert fresh.draft([], []).ids.shape == (0, 4, TOP_K)
    assert fresh.sequences == 1


def test_features_in_another_dtype(fresh: Drafter) -> None:
    half = feats(9).bfloat16()
    a, b = (fresh.draft([feed("s", 9)], [features]) for features in (half, half.float()))
    assert torch.equal(a.logprobs, b.logprobs)


ROWS = [FeatureSlice(0, [0, 1], 9)]
WRONG = {
    "unknown": (DraftItem("new", False, ROWS, 3, 11), "no context is held for it; send all of it with restart"),
    "gap": (DraftItem("s", False, [FeatureSlice(0, [0], 10)], 3, 11), "context comes at position 10, expected 9"),
    "overlap": (DraftItem("s", False, [FeatureSlice(0, [0], 8)], 3, 9), "context comes at position 8, expected 9"),
    "gap within": (
        DraftItem("s", True, [FeatureSlice(0, [0], 4), FeatureSlice(0, [1], 6)], 3, 7),
        "context comes at position 6, expected 5",
    ),
    "negative": (DraftItem("s", True, [FeatureSlice(0, [0], -1)], 3, 0), "position -1, expected 0 or later"),
    "bonus too far": (DraftItem("s", False, ROWS, 3, 12), "bonus token is at position 12, but the context ends before"),
    "no context": (DraftItem("s", True, [], 3, 9), "position 9, but the context ends before position 0"),
    "source": (DraftItem("s", False, [FeatureSlice(1, [0], 9)], 3, 10), "feature source 1 is not among the 1 given"),
    "row": (DraftItem("s", False, [FeatureSlice(0, [70], 9)], 3, 10), "are not all among the 70"),
    "negative row": (DraftItem("s", False, [FeatureSlice(0, [-1], 9)], 3, 10), "are not all among the 70"),
    "bonus outside": (DraftItem("s", False, ROWS, 97, 11), "bonus token 97 is outside the vocabulary of 97"),
    "block past the end": (feed("s", 60), "a block at position 60 does not fit the drafter's 64 positions"),
    "context past the end": (feed("s", 65, bonus=None), "up to position 65 is past the drafter's 64 positions"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_item_changes_nothing(fresh: Drafter, make: Make, case: str) -> None:
    """Not of its own sequence and not of a good one in the same call; both go on as if it had never come."""
    item, words = WRONG[case]
    features = feats(70)
    twin = make(fresh.info.checkpoint_dir)
    for drafter in (fresh, twin):
        drafter.draft([feed("s", 9, bonus=None), feed("good", 5, bonus=None)], [features])
    grow = DraftItem("good", False, [FeatureSlice(0, [5, 6], 5)], 3, 7)
    with pytest.raises(ValueError, match=f"sequence '{item.sequence}': .*{words}"):
        fresh.draft([grow, item], [features])
    follow = [grow, DraftItem("s", False, [FeatureSlice(0, [9], 9)], 4, 10)]
    after, expected = fresh.draft(follow, [features]), twin.draft(follow, [features])
    assert torch.equal(after.ids, expected.ids) and torch.equal(after.logprobs, expected.logprobs)
    assert fresh.sequences == 2


def test_a_failure_inside_the_pass_changes_nothing(
    fresh: Drafter, one_shot: OneShot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Say, memory that runs out at the lm_head: the same call works afterwards."""
    features = feats(70)
    fresh.draft([feed("s", 9, bonus=None)], [features])
    item = DraftItem("s", False, [FeatureSlice(0, [9, 10], 9)], 4, 11)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(fresh._contexts._stack, "_lm_head", torch.nn.Linear(31, 97))
        fresh.draft([item, feed("new", 5)], [features])
    assert fresh.sequences == 1
    assert_drafts(fresh.draft([item], [features]), 0, one_shot(fresh, features[:11], 0, 4))


def test_bf16_stays_near_fp32(drafter: Drafter, make: Make, one_shot: OneShot) -> None:
    """The runtime dtype, with packed layers where the CPU has them."""
    low = make(drafter.info.checkpoint_dir, top_k=97, dtype=torch.bfloat16)
    candidates = low.draft([feed("s", 30)], [feats(30)])
    exact = one_shot(drafter, feats(30), 0, 3).gather(1, candidates.ids[0].long().cpu())
    # hidden states of a plain bf16 model are 0.01–0.025 off on average here; an lm_head row of norm ≈ 3 adds them up
    assert (candidates.logprobs[0].cpu() - exact).abs().mean() < 0.15


def test_twice_in_one_call(fresh: Drafter) -> None:
    with pytest.raises(ValueError, match="sequence 's': twice in one call"):
        fresh.draft([feed("s", 3), feed("s", 3)], [feats(9)])
    assert fresh.sequences == 0


def test_features_of_the_wrong_width(fresh: Drafter) -> None:
    with pytest.raises(ValueError, match=r"features\[0\] is \(9, 64\), expected \[rows, 96\]"):
        fresh.draft([feed("s", 3)], [torch.zeros(9, 64)])


def test_the_last_position_where_a_block_fits(fresh: Drafter, one_shot: OneShot) -> None:
    features = feats(70)
    assert fresh.info.drafts_at(59) and not fresh.info.drafts_at(60)
    assert_drafts(fresh.draft([feed("s", 59)], [features]), 0, one_shot(fresh, features[:59], 0, 3))


def test_made_for_another_target(
    drafter_dir: Callable[..., Path], target_dir: Callable[..., Path], config: DrafterConfig
) -> None:
    with pytest.raises(ValueError, match="drafter made for another target"):
        Drafter(drafter_dir(config), target_dir("llama", vocab_size=101))
