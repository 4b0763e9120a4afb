"""The page allocator against a set: no page is ever in two hands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.verifier.pages import OutOfPages, PageAllocator

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["allocate", "free"]), st.integers(0, 9), st.randoms(use_true_random=False))
)


@given(pages=st.integers(1, 12), operations=OPERATIONS)
def test_every_page_has_one_owner(pages: int, operations: list) -> None:
    allocator, held = PageAllocator(pages, 16), []
    for name, n, random in operations:
        if name == "allocate" and n <= allocator.free_pages:
            taken = allocator.allocate(n)
            assert len(taken) == n and not set(taken) & set(held)
            held += taken
        elif name == "allocate":
            before = allocator.free_pages
            with pytest.raises(OutOfPages, match=f"{n} KV pages asked for, {before} of {pages} free"):
                allocator.allocate(n)
            assert allocator.free_pages == before
        else:
            random.shuffle(held)
            allocator.free(held[:n])
            held = held[n:]
        assert len(set(held)) == len(held) and set(held) <= set(range(pages))
        assert allocator.free_pages == pages - len(held)
    allocator.free(held)
    assert sorted(allocator.allocate(pages)) == list(range(pages))


@pytest.mark.parametrize("wrong", [[0], [3], [1, 1], [1, 0], [-1], [4], [1, 99]])
def test_a_wrong_free_is_refused_whole(wrong: list[int]) -> None:
    allocator = PageAllocator(4, 16)
    taken = allocator.allocate(4)
    allocator.free([0, 3])
    with pytest.raises(ValueError, match=r"KV page -?\d+ is (freed twice|not one of the 4 of this pool)"):
        allocator.free(wrong)
    assert allocator.free_pages == 2
    allocator.free([p for p in taken if p not in (0, 3)])
    assert allocator.free_pages == 4


def test_sizes() -> None:
    allocator = PageAllocator(2, 16)
    assert [allocator.pages_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    with pytest.raises(ValueError, match="at least one page"):
        PageAllocator(0, 16)
    with pytest.raises(ValueError, match="cannot allocate -1 pages"):
        allocator.allocate(-1)
