"""The drafter that replays recordings: what it reads, what it shows where, and that a real one runs beneath it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddtree.drafter.config import DrafterConfig
from ddtree.drafter.drafter import Candidates, Drafter
from ddtree.drafter.items import DraftItem, FeatureSlice
from ddtree.drafter.recordings import Recording, acceptance_by_depth, expected_length, read_recordings
from ddtree.drafter.synthetic import SyntheticDrafter, overwrite

TOP_K = 6
PROMPT = 4
ANSWER = tuple(range(20, 60))


@pytest.fixture(scope="module")
def real(config: DrafterConfig, drafter_dir: Callable[..., Path], target_dir: Callable[..., Path]) -> Drafter:
    return Drafter(drafter_dir(config), target_dir(), dtype=torch.float32, top_k=TOP_K, threads=1)


def item(sequence: str, position: int, bonus: int | None) -> DraftItem:
    return DraftItem(sequence, True, [FeatureSlice(0, list(range(position)), 0)], bonus, position)


def draft(synthetic: SyntheticDrafter, *items: DraftItem) -> Candidates:
    width = len(synthetic.info.target_layer_ids) * synthetic.info.hidden_size
    features = torch.randn(64, width, generator=torch.Generator().manual_seed(0))
    candidates = synthetic.draft(items, [features])
    synthetic.release([x.sequence for x in items])
    return candidates


def test_the_recorded_tokens_stand_first(real: Drafter) -> None:
    synthetic = SyntheticDrafter(real, {"a": Recording(PROMPT, ANSWER)}, [1.0] * 4)
    candidates = draft(synthetic, item("a/x", PROMPT, 20), item("a/y", PROMPT + 10, 30), item("b/x", PROMPT, 20))
    assert candidates.ids[0, :, 0].tolist() == [21, 22, 23, 24] and candidates.ids[1, :, 0].tolist() == [31, 32, 33, 34]
    for known in candidates.ids[:2].flatten(0, 1).tolist():
        assert len(set(known)) == TOP_K and min(known) >= 0
    assert (candidates.logprobs[:2].diff(dim=-1) < 0).all()
    assert (candidates.logprobs[:2].exp().sum(-1) - 1).abs().max() < 1e-5


def test_a_sequence_that_left_its_recording_gets_nothing_right(real: Drafter) -> None:
    synthetic = SyntheticDrafter(real, {"a": Recording(PROMPT, ANSWER)}, [1.0] * 4)
    strangers = [item("b/x", PROMPT, 20), item("a", PROMPT, 20), item("a/1", PROMPT, 21), item("a/2", PROMPT - 1, 20)]
    strangers += [item("a/3", PROMPT + len(ANSWER), 59)]
    candidates, untouched = draft(synthetic, *strangers), draft(real, *strangers)  # type: ignore[arg-type]
    assert torch.equal(candidates.ids[..., :-1], untouched.ids[..., :-1]), "the real drafter's own"
    assert (candidates.ids[..., -1] == -1).all() and (candidates.logprobs[..., -1] == -torch.inf).all()


def test_the_end_of_a_recording_is_not_passed(real: Drafter) -> None:
    synthetic = SyntheticDrafter(real, {"a": Recording(PROMPT, ANSWER)}, [1.0] * 4)
    candidates = draft(synthetic, item("a/x", PROMPT + 37, 57))
    assert candidates.ids[0, :2, 0].tolist() == [58, 59]
    assert candidates.ids[0, :, -1].tolist()[2:] == [-1, -1]


def test_feeding_alone_drafts_nothing_and_counts(real: Drafter) -> None:
    synthetic = SyntheticDrafter(real, {"a": Recording(PROMPT, ANSWER)}, [1.0] * 4)
    features = torch.zeros(8, len(synthetic.info.target_layer_ids) * synthetic.info.hidden_size)
    assert len(synthetic.draft([item("a/x", PROMPT, None)], [features]).ids) == 0
    assert synthetic.sequences == real.sequences == 1
    synthetic.release(["a/x"])
    assert real.sequences == 0


def test_coins_are_the_positions_own_and_as_often_right_as_asked(real: Drafter) -> None:
    long = Recording(1, tuple(torch.randint(97, (40,), generator=torch.Generator().manual_seed(1)).tolist()))
    recordings = {f"r{i}": long for i in range(60)}
    asked = (0.9, 0.5, 0.25, 0.0)
    synthetic = SyntheticDrafter(real, recordings, asked)
    shown = torch.zeros(4)
    for at in (0, 5, 10, 15, 20):
        items = [item(f"r{i}/x", 1 + at, long.token_ids[at]) for i in range(60)]
        together = draft(synthetic, *items)
        alone = draft(SyntheticDrafter(real, recordings, asked), items[7])
        assert torch.equal(together.ids[7], alone.ids[0]), "whatever else is in the call, and in every run"
        truth = torch.tensor(long.token_ids[at + 1 : at + 5])
        hits = together.ids == truth[None, :, None]
        assert torch.equal(hits.any(-1), hits[..., 0]), "first or nowhere"
        shown += hits[..., 0].sum(0)
    assert ((shown / 300) - torch.tensor(asked)).abs().max() < 0.08


@pytest.mark.parametrize("k", [1, 2, 5])
def test_overwriting_leaves_no_token_twice(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    ids = torch.stack([torch.randperm(8, generator=generator)[:k] for _ in range(64)]).int().view(8, 8, k)
    real = Candidates(torch.zeros(8, 8, k), ids)
    tokens = torch.randint(-1, 8, (8, 8), generator=generator).int()
    shown = (torch.rand(8, 8, generator=generator) < 0.5) & (tokens >= 0)
    made = overwrite(real, tokens, shown)
    for token, right, found, logprobs in zip(
        tokens.flatten(), shown.flatten(), made.ids.flatten(0, 1), made.logprobs.flatten(0, 1), strict=True
    ):
        present = found[found >= 0].tolist()
        assert len(set(present)) == len(present) == (k if right else k - 1)
        assert present[0] == token if right else token not in present
        assert torch.equal(found < 0, logprobs == -torch.inf)


def test_it_says_what_it_is(real: Drafter, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        SyntheticDrafter(real, {"a": Recording(PROMPT, ANSWER)}, acceptance_by_depth(4, None, 3.0))
    assert "SYNTHETIC DRAFTER, for benchmarks only" in caplog.text and "acceptance length of 3.00" in caplog.text
    with pytest.raises(ValueError, match="given for 3 depths; this drafter has 4"):
        SyntheticDrafter(real, {}, [0.5] * 3)


@pytest.mark.parametrize(("horizon", "length"), [(4, 1.0), (4, 3.3), (15, 5.0), (15, 16.0), (7, 8.0)])
def test_an_acceptance_length_is_solved_for(horizon: int, length: float) -> None:
    acceptance = acceptance_by_depth(horizon, None, length)
    assert len(set(acceptance)) == 1 and len(acceptance) == horizon
    assert expected_length(acceptance) == pytest.approx(length, abs=1e-6)


def test_acceptance_is_checked() -> None:
    assert acceptance_by_depth(4, [0.9, 0.5], None) == (0.9, 0.5, 0.0, 0.0)
    assert expected_length([0.9, 0.5, 0.0, 0.0]) == pytest.approx(1 + 0.9 + 0.45)
    with pytest.raises(ValueError, match="for 5 depths; this drafter has 4"):
        acceptance_by_depth(4, [0.5] * 5, None)
    for length in (0.5, 5.1):
        with pytest.raises(ValueError, match=f"length of {length} is impossible: 4 depths give 1 to 5"):
            acceptance_by_depth(4, None, length)


def test_recordings_are_read(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    entries = [{"request_id": f"bench-{i}/0", "prompt_tokens": i, "token_ids": [i, 2], "more": None} for i in range(3)]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert read_recordings(path) == {f"bench-{i}/0": Recording(i, (i, 2)) for i in range(3)}
    with pytest.raises(ValueError, match=r"no recording at .*gone; `ddtree bench --record"):
        read_recordings(tmp_path / "gone")
    for line in ("{", "[]", '{"request_id": "a"}', '{"request_id": 1, "prompt_tokens": 1, "token_ids": []}'):
        path.write_text(json.dumps(entries[0]) + "\n" + line)
        with pytest.raises(ValueError, match="line 2: expected request_id, prompt_tokens and token_ids"):
            read_recordings(path)
    path.write_text("")
    with pytest.raises(ValueError, match="holds no recording"):
        read_recordings(path)
