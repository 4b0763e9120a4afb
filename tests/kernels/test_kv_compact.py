"""kv_compact against moving rows one by one; nothing else may change, not by a bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree.kernels import kv_compact

from .devices import on_devices
from .ref import compact
from .strategies import seeds

GARBAGE = 2**30
dtypes = st.sampled_from([torch.float32, torch.bfloat16])  # rows of 2 to 288 bytes, so words of 2 to 16 bytes


def int32(values: list, device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def move(caches: list[Tensor], table: list, page_size: int, seq_len: list, path: list, n_accepted: list) -> None:
    """kv_compact from lists, on the caches' device."""
    table, seq_len, path, n_accepted = (int32(x, caches[0].device) for x in (table, seq_len, path, n_accepted))
    kv_compact(caches, table, page_size, seq_len, path, n_accepted)


@on_devices
@given(
    seeds,
    st.integers(1, 4),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([0, 1, 63, 64, 65]),
    st.integers(1, 40),
    dtypes,
)
@settings(max_examples=80, deadline=None)
def test_equals_moving_rows_one_by_one(device, rng, sequences, page_size, longest, nodes, dtype):
    seq_len = rng.integers(0, longest + 1, sequences).tolist()
    pages = [-(-(n + nodes) // page_size) for n in seq_len]
    numbers = rng.permutation(sum(pages) + 2).tolist()
    tables = [[numbers.pop() for _ in range(n)] for n in pages]
    depth = int(rng.integers(1, min(nodes, 8) + 1))
    paths = []
    for _ in range(sequences):
        rest = rng.choice(nodes - 1, rng.integers(0, depth), replace=False) + 1 if nodes > 1 else []
        paths.append([0, *sorted(int(i) for i in rest)])
    shapes = ((2, 4), (5,), (), (6,), (72,))
    caches = [torch.randn(3, sum(pages) + 2, page_size, *shape).to(dtype) for shape in shapes]
    caches[0][0, numbers[0]] = torch.nan  # in a page of nobody
    expected = []
    for cache in caches:
        for table, length, path in zip(tables, seq_len, paths, strict=True):
            cache = compact(cache, table, page_size, length, path)
        expected.append(cache)
    width = max(pages) + 1
    moved = [cache.to(device) for cache in caches]
    move(
        moved,
        [table + [GARBAGE] * (width - len(table)) for table in tables],
        page_size,
        seq_len,
        [path + [-1] * (depth + 1 - len(path)) for path in paths],
        [len(path) for path in paths],
    )
    for actual, wanted in zip(moved, expected, strict=True):
        assert torch.equal(actual.cpu().view(torch.int16), wanted.view(torch.int16))


@on_devices
def test_a_path_longer_than_a_block_stages_at_once(device):
    cache = torch.arange(300.0, device=device).view(1, 3, 100)
    path = [*range(130), *range(131, 290)]
    move([cache], [[2, 0, 1]], 100, [5], [path], [len(path)])
    committed = cache[0, [2, 0, 1]].flatten()[5 : 5 + len(path)]
    row = torch.arange(300.0).view(3, 100)[[2, 0, 1]].flatten()
    assert torch.equal(committed.cpu(), row[5 + torch.tensor(path)])


@on_devices
def test_path_past_its_length_is_not_read(device):
    cache = torch.arange(8.0, device=device).view(1, 2, 4)
    move([cache], [[1, 0]], 4, [2], [[0, 3, 999]], [2])
    assert cache.flatten().tolist() == [
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        1,
    ]  # slot 3 = page 1, row 3 now holds slot 5 = page 0, row 1


@on_devices
def test_overlapping_moves_read_before_they_write(device):
    cache = torch.arange(6.0, device=device).view(1, 1, 6)
    move([cache], [[0]], 6, [0], [[0, 2, 3, 4]], [4])
    assert cache.flatten().tolist() == [0, 2, 3, 4, 4, 5]


@on_devices
def test_a_straight_path_leaves_the_cache_as_it_is(device):
    cache = torch.randn(2, 3, 4, 5, device=device)
    before = cache.clone()
    move([cache], [[2, GARBAGE]], 4, [0], [[0, 1, 2, -1]], [3])
    assert torch.equal(cache, before)


@on_devices
def test_no_sequences(device):
    none = int32([], device)
    kv_compact([torch.zeros(2, 3, 4, 5, device=device)], none.view(0, 0), 4, none, none.view(0, 4), none)


def test_a_straight_path_touches_nothing():
    cache = torch.zeros(2, 3, 4, 5)
    version = cache._version
    kv_compact([cache], int32([[2, GARBAGE]]), 4, int32([0]), int32([[0, 1, 2, -1]]), int32([3]))
    assert cache._version == version


@on_devices
def test_writes_through_a_cache_that_is_a_view(device):
    """Keys and values in one tensor [layers, 2, pages, page]: each half is not contiguous as a whole."""
    both = torch.arange(2 * 2 * 4, dtype=torch.float32, device=device).view(2, 2, 1, 4)
    move([both[:, 0], both[:, 1]], [[0]], 4, [1], [[0, 2]], [2])
    assert both.flatten().tolist() == [0, 1, 3, 3, 4, 5, 7, 7, 8, 9, 11, 11, 12, 13, 15, 15]


def test_arguments():
    good = {"page_table": int32([[0]]), "page_size": 4, "seq_len": int32([1]), "path": int32([[0, 2]])}
    good["n_accepted"] = int32([2])
    with pytest.raises(ValueError, match=r"caches\[0\] has shape \[1, 2, 5\]; pass \[layers, pages, 4, …\]"):
        kv_compact([torch.zeros(1, 2, 5)], **good)
    with pytest.raises(ValueError, match=r"caches\[0\] is not contiguous over pages and slots"):
        kv_compact([torch.zeros(1, 4, 2, 3).transpose(1, 2)], **good)
    with pytest.raises(ValueError, match=r"path has shape \[2\]; pass \[1, any\]"):
        kv_compact([torch.zeros(1, 2, 4)], **{**good, "path": int32([0, 2])})
