"""Policy alone: pages are never shared or lost, rows stay within budget, and the oldest request always gets on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.deployments.requests import GenerationRequest, SamplingParams
from ddtree.deployments.scheduler import Entry, Limits, QueueFull, Scheduler
from ddtree.deployments.sequence import Sequence
from ddtree.verifier.pages import PageAllocator

PAGE = 4
LIMITS = Limits(max_sequences=4, max_waiting=50, prefill_rows=8, max_positions=64, horizon=5, rebuild_window=6)


def sequence(name: str, prompt: int, max_tokens: int, budget: int, stop: tuple[int, ...] = ()) -> Sequence:
    ids = tuple(range(10, 10 + prompt))
    return Sequence(GenerationRequest(name, ids, max_tokens, stop, SamplingParams(), budget), 0.0)


def play(scheduler: Scheduler, entry: Entry, accepted: int) -> None:
    """What a round does to a sequence: its rows are computed, and tokens appended when the target draws."""
    seq = entry.sequence
    length = 1 + min(accepted, entry.budget) if seq.decoding else entry.rows
    drawn = [7] * length if seq.decoding else [7] * entry.finishes
    seq.computed += length
    if drawn and seq.append(drawn)[1]:
        scheduler.finish(seq)


shapes = st.lists(st.tuples(st.integers(1, 24), st.integers(1, 20), st.integers(0, 6)), min_size=1, max_size=8)


@given(shapes, st.integers(13, 40), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_every_request_ends_and_every_page_comes_back(
    wanted: list[tuple[int, int, int]], pages: int, random: object
) -> None:
    scheduler = Scheduler(PageAllocator(pages, PAGE), LIMITS)
    sequences = [sequence(f"s{i}", *shape) for i, shape in enumerate(wanted)]
    for seq in sequences:
        scheduler.add(seq)
    for _ in range(3000):
        entries = scheduler.plan()
        if not entries:
            break
        held = {page for seq in scheduler.running for page in seq.pages}
        assert len(held) + scheduler.pages.free_pages == pages
        for entry in entries:
            seq = entry.sequence
            own = seq.pages[max(seq.stored, seq.computed) // PAGE :]
            others = {page for other in scheduler.running if other is not seq for page in other.pages}
            assert not others & set(own), "a page that is written has one owner"
        assert sum(e.rows for e in entries if not e.sequence.decoding) <= LIMITS.prefill_rows
        assert [e.sequence.decoding for e in entries] == sorted((e.sequence.decoding for e in entries), reverse=True)
        for entry in entries:
            assert len(entry.sequence.pages) * PAGE >= entry.sequence.computed + entry.rows, "its rows have slots"
        for entry in entries:
            play(scheduler, entry, random.randint(0, 6))  # type: ignore[attr-defined]
    assert not scheduler.running and not scheduler.waiting
    assert scheduler.pages.free_pages == pages
    assert all(seq.generated == seq.request.max_tokens for seq in sequences)


def test_the_oldest_takes_pages_from_the_newest() -> None:
    scheduler = Scheduler(PageAllocator(4, PAGE), replace(LIMITS, prefix_cache=False))
    old, new = sequence("old", 8, 20, 0), sequence("new", 8, 20, 0)
    for seq in (old, new):
        scheduler.add(seq)
    for _ in range(3):
        for entry in scheduler.plan():
            play(scheduler, entry, 0)
    assert old.computed > 8 and not new.pages and new.computed == 0, "new gave its pages up and is computed again later"


def test_a_long_prompt_shares_the_row_budget_in_order_of_arrival() -> None:
    scheduler = Scheduler(PageAllocator(40, PAGE), LIMITS)
    long, short = sequence("long", 20, 4, 0), sequence("short", 3, 4, 0)
    scheduler.add(long)
    scheduler.add(short)
    seen = []
    for _ in range(3):
        entries = scheduler.plan()
        seen.append({e.sequence.id: e.rows for e in entries})
        for entry in entries:
            play(scheduler, entry, 0)
    assert seen == [{"long": 8}, {"long": 8}, {"long": 4, "short": 3}]


def test_a_context_rebuilt_in_the_middle_of_a_prompt_skips_no_row() -> None:
    scheduler = Scheduler(PageAllocator(40, PAGE), LIMITS)
    seq = sequence("s", 20, 4, 3)
    scheduler.add(seq)
    play(scheduler, scheduler.plan()[0], 0)
    assert seq.computed == 8
    scheduler.rebuild_context(seq)
    assert seq.computed == seq.context == 8
    while not seq.decoding:
        play(scheduler, scheduler.plan()[0], 0)
    scheduler.rebuild_context(seq)
    assert seq.computed == seq.context == len(seq.tokens) - 1 - LIMITS.rebuild_window


def finish(scheduler: Scheduler, seq: Sequence) -> None:
    while seq in scheduler.running or seq in scheduler.waiting:
        for entry in scheduler.plan():
            play(scheduler, entry, 0)


@pytest.mark.parametrize(
    ("budget", "computed", "cached"),
    [
        (0, 16, 16),  # four pages; the fifth holds the last prompt token, which is always computed
        (3, 20 - 1 - LIMITS.rebuild_window, 13),  # a drafter wants the last tokens computed for its context
    ],
)
def test_a_prompt_takes_over_the_pages_of_an_equal_one(budget: int, computed: int, cached: int) -> None:
    scheduler = Scheduler(PageAllocator(40, PAGE), LIMITS)
    first, second = sequence("first", 20, 3, 0), sequence("second", 20, 3, budget)
    scheduler.add(first)
    finish(scheduler, first)
    scheduler.add(second)
    (entry,) = scheduler.plan()
    assert (second.computed, second.stored, second.stats.cached_tokens) == (computed, 16, cached)
    assert entry.rows == min(20 - computed, LIMITS.prefill_rows)
    finish(scheduler, second)
    assert second.generated == 3


def test_who_wants_no_prefix_cache_computes_all() -> None:
    scheduler = Scheduler(PageAllocator(40, PAGE), LIMITS)
    first, second = sequence("first", 20, 3, 0), sequence("second", 20, 3, 0)
    second.request = replace(second.request, prefix_cache=False)
    for seq in (first, second):
        scheduler.add(seq)
        finish(scheduler, seq)
    assert second.stats.cached_tokens == 0


@pytest.mark.parametrize("how", ["the pool is lost", "the first one is damaged"])
def test_lost_rows_are_not_taken_over(how: str) -> None:
    scheduler = Scheduler(PageAllocator(40, PAGE), LIMITS)
    first, second = sequence("first", 20, 3, 0), sequence("second", 20, 3, 0)
    scheduler.add(first)
    for _ in range(3):
        for entry in scheduler.plan():
            play(scheduler, entry, 0)
    if how == "the pool is lost":
        finish(scheduler, first)
        scheduler.restart_all()
    else:
        scheduler.finish(first, damaged=True)
    scheduler.add(second)
    scheduler.plan()
    assert second.stats.cached_tokens == 0


def test_a_preempted_sequence_finds_its_own_pages_again() -> None:
    scheduler = Scheduler(PageAllocator(6, PAGE), LIMITS)
    old, new = sequence("old", 8, 9, 0), sequence("new", 9, 12, 0)
    new.request = replace(new.request, prompt_ids=tuple(range(50, 59)))
    new.tokens = list(new.request.prompt_ids)
    for seq in (old, new):
        scheduler.add(seq)
    for _ in range(12):
        for entry in scheduler.plan():
            play(scheduler, entry, 0)
    assert scheduler.preemptions
    finish(scheduler, new)
    assert new.generated == 12 and new.stats.cached_tokens >= 8


def test_no_tree_reaches_past_the_context_or_the_last_token() -> None:
    scheduler = Scheduler(PageAllocator(40, PAGE), LIMITS)
    near_the_end, one_left = sequence("a", LIMITS.max_positions - 4, 9, 6), sequence("b", 3, 2, 6)
    for seq in (near_the_end, one_left):
        scheduler.add(seq)
    entries: list[Entry] = []
    while not (near_the_end.decoding and one_left.decoding):
        entries = scheduler.plan()
        for entry in [e for e in entries if not e.sequence.decoding]:
            play(scheduler, entry, 0)
    assert all(e.budget == 0 for e in scheduler.plan())


def test_the_queue_is_bounded() -> None:
    scheduler = Scheduler(PageAllocator(4, PAGE), LIMITS)
    for i in range(LIMITS.max_waiting):
        scheduler.add(sequence(f"s{i}", 1, 1, 0))
    with pytest.raises(QueueFull, match="50 requests are waiting"):
        scheduler.add(sequence("late", 1, 1, 0))


@pytest.mark.parametrize(
    ("tokens", "taken", "reason"),
    [
        ([1, 2], [1, 2], None),
        ([1, 9, 3], [1, 9], "stop"),
        ([1, 2, 3, 4], [1, 2, 3], "length"),
        ([1, 2, 9], [1, 2, 9], "stop"),
    ],
)
def test_a_round_ends_where_the_request_does(tokens: list[int], taken: list[int], reason: str | None) -> None:
    seq = sequence("s", 2, 3, 0, stop=(9,))
    assert seq.append(tokens) == (taken, reason)
    assert seq.generated == len(taken)


def test_what_is_in_a_step_stays_as_it_is() -> None:
    """Neither planned again, nor preempted, nor dropped."""
    scheduler = Scheduler(PageAllocator(6, PAGE), LIMITS)
    old, flying = sequence("old", 6, 20, 0), sequence("flying", 6, 20, 0)
    for seq in (old, flying):
        scheduler.add(seq)
        for _ in range(2):
            for entry in scheduler.plan():
                play(scheduler, entry, 0)
    flying.flying, flying.cancelled = True, True
    held = list(flying.pages)
    while scheduler.pages.free_pages:
        for entry in scheduler.plan():
            assert entry.sequence is old
            play(scheduler, entry, 0)
    for _ in range(PAGE):
        for entry in scheduler.plan():  # the oldest would take the pages of a later one now
            play(scheduler, entry, 0)
    assert flying.pages == held and scheduler.preemptions == 0
    assert scheduler.drop_cancelled() == []
    flying.flying = False
    assert scheduler.drop_cancelled() == [flying]


def test_half_of_the_sequences_are_those_that_waited_longest() -> None:
    scheduler = Scheduler(PageAllocator(40, PAGE), LIMITS)
    sequences = [sequence(f"s{i}", 1, 20, 0) for i in range(4)]
    for seq in sequences:
        scheduler.add(seq)
    turns: list[set[str]] = []
    for _ in range(6):
        entries = scheduler.plan(2)
        turns.append({entry.sequence.id for entry in entries})
        for entry in entries:
            play(scheduler, entry, 0)
    assert turns == [{"s0", "s1"}, {"s2", "s3"}] * 3


@pytest.mark.parametrize("budget", [0, 3])
def test_of_prompts_that_begin_alike_one_computes_and_the_others_wait(budget: int) -> None:
    """The choices of one request above all. Who begins differently does not wait behind them."""
    scheduler = Scheduler(PageAllocator(60, PAGE), replace(LIMITS, max_sequences=5))
    twins = [sequence(f"twin{i}", 20, 3, budget) for i in range(3)]
    other = sequence("other", 3, 3, 0)
    for seq in (*twins, other):
        scheduler.add(seq)
    rows: dict[str, int] = {}
    joined: dict[str, int] = {}
    for i in range(100):
        if not (entries := scheduler.plan()):
            break
        for entry in entries:
            joined.setdefault(entry.sequence.id, i)
            rows[entry.sequence.id] = rows.get(entry.sequence.id, 0) + entry.rows * (not entry.sequence.decoding)
            play(scheduler, entry, 0)
    rest = 4 if not budget else 1 + LIMITS.rebuild_window
    assert rows == {"twin0": 20, "twin1": rest, "twin2": rest, "other": 3}
    assert (joined["twin0"], joined["other"]) == (0, 2), "it joined at once, and had rows when there were any"
    assert joined["twin1"] == 2, "when its last complete page was there"


def test_pages_that_are_there_already_are_not_waited_for() -> None:
    scheduler = Scheduler(PageAllocator(60, PAGE), LIMITS)
    first = sequence("first", 20, 3, 0)
    scheduler.add(first)
    finish(scheduler, first)
    for i in range(2):
        scheduler.add(sequence(f"s{i}", 20, 3, 0))
    assert [entry.sequence.id for entry in scheduler.plan()] == ["s0", "s1"]


def test_who_waits_for_one_that_is_cancelled_goes_on_alone() -> None:
    scheduler = Scheduler(PageAllocator(60, PAGE), LIMITS)
    first, second = sequence("first", 20, 3, 0), sequence("second", 20, 3, 0)
    scheduler.add(first)
    scheduler.add(second)
    (entry,) = scheduler.plan()
    assert entry.sequence is first
    first.cancelled = True
    scheduler.drop_cancelled()
    finish(scheduler, second)
    assert second.generated == 3
