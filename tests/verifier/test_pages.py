"""The page allocator against a model of what everybody holds and what every kept page stands for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.verifier.pages import OutOfPages, PageAllocator, page_keys

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "free", "keep", "share", "forget"]),
        st.integers(0, 9),
        st.randoms(use_true_random=False),
    )
)


@given(pages=st.integers(1, 12), operations=OPERATIONS)
def test_a_page_is_given_to_one_and_shared_by_those_who_ask_for_its_content(pages: int, operations: list) -> None:
    allocator = PageAllocator(pages, 16)
    held: list[list[int]] = []  # of each sequence
    content: dict[int, bytes] = {}  # what the pages that were kept stand for, as long as nobody else got them
    for name, n, random in operations:
        in_use = {page for mine in held for page in mine}
        if name == "allocate" and n <= allocator.free_pages:
            taken = allocator.allocate(n)
            assert len(taken) == len(set(taken)) == n and not set(taken) & in_use
            held.append(taken)
            for page in taken:
                content.pop(page, None)
        elif name == "allocate":
            before = allocator.free_pages
            with pytest.raises(OutOfPages, match=f"{n} KV pages asked for, {before} of {pages} free"):
                allocator.allocate(n)
            assert allocator.free_pages == before
        elif name == "free" and held:
            allocator.free(held.pop(random.randrange(len(held))))
        elif name == "keep" and in_use:
            page, key = random.choice(sorted(in_use)), bytes([n])
            if key not in content.values() and page not in content:
                content[page] = key
            allocator.keep(page, key)
        elif name == "share":
            keys = [bytes([random.randrange(10)]) for _ in range(n)]
            keys = list(dict.fromkeys(keys))
            shared = allocator.share(keys)
            assert [content[page] for page in shared] == keys[: len(shared)]
            assert len(shared) == len(keys) or keys[len(shared)] not in content.values()
            held.append(shared)
        elif name == "forget":
            allocator.forget()
            content.clear()
        in_use = {page for mine in held for page in mine}
        assert allocator.free_pages == pages - len(in_use)
        assert allocator.kept_pages == len(content)
    for mine in held:
        allocator.free(mine)
    assert sorted(allocator.allocate(pages)) == list(range(pages))
    assert allocator.kept_pages == 0


def test_the_longest_unused_page_goes_first_and_the_end_of_a_prefix_before_its_beginning() -> None:
    allocator = PageAllocator(6, 16)
    old, new = allocator.allocate(2), allocator.allocate(2)
    for page in (*old, *new):
        allocator.keep(page, bytes([page]))
    allocator.free(old)
    allocator.free(new)
    assert set(allocator.allocate(2)).isdisjoint((*old, *new)), "what nobody kept is used up first"
    assert allocator.allocate(1) == old[1:]
    assert allocator.allocate(1) == old[:1]
    assert allocator.share([bytes([new[0]])]) == new[:1]
    assert allocator.allocate(1) == new[1:]


def test_a_key_stands_for_all_tokens_up_to_its_page() -> None:
    tokens = list(range(40))
    keys = page_keys(tokens, 16)
    assert len(keys) == 2
    assert page_keys(tokens[:32], 16) == keys
    assert page_keys(tokens, 16, keys[:1]) == keys
    assert page_keys([99, *tokens[1:]], 16)[1] != keys[1]
    assert page_keys(tokens[16:32], 16)[0] != keys[1]


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
