"""kv_compact against moving rows one by one; nothing else may change, not by a bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree.kernels import kv_compact

from .ref import compact
from .strategies import seeds

GARBAGE = 2**30


def int32(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@given(seeds, st.integers(1, 4), st.sampled_from([1, 3, 16]), st.sampled_from([0, 1, 63, 64, 65]), st.integers(1, 40))
@settings(max_examples=80, deadline=None)
def test_equals_moving_rows_one_by_one(rng, sequences, page_size, longest, nodes):
    seq_len = rng.integers(0, longest + 1, sequences).tolist()
    pages = [-(-(n + nodes) // page_size) for n in seq_len]
    numbers = rng.permutation(sum(pages) + 2).tolist()
    tables = [[numbers.pop() for _ in range(n)] for n in pages]
    depth = int(rng.integers(1, min(nodes, 8) + 1))
    paths = []
    for _ in range(sequences):
        rest = rng.choice(nodes - 1, rng.integers(0, depth), replace=False) + 1 if nodes > 1 else []
        paths.append([0, *sorted(int(i) for i in rest)])
    caches = [torch.randn(3, sum(pages) + 2, page_size, *shape) for shape in ((2, 4), (5,), ())]
    caches[0][0, numbers[0]] = torch.nan  # in a page of nobody
    expected = []
    for cache in caches:
        for table, length, path in zip(tables, seq_len, paths, strict=True):
            cache = compact(cache, table, page_size, length, path)
        expected.append(cache)
    width = max(pages) + 1
    kv_compact(
        caches,
        int32([table + [GARBAGE] * (width - len(table)) for table in tables]),
        page_size,
        int32(seq_len),
        int32([path + [-1] * (depth + 1 - len(path)) for path in paths]),
        int32([len(path) for path in paths]),
    )
    for actual, wanted in zip(caches, expected, strict=True):
        assert torch.equal(actual.view(torch.int32), wanted.view(torch.int32))


def test_path_past_its_length_is_not_read():
    cache = torch.arange(8.0).view(1, 2, 4)
    kv_compact([cache], int32([[1, 0]]), 4, int32([2]), int32([[0, 3, 999]]), int32([2]))
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


def test_overlapping_moves_read_before_they_write():
    cache = torch.arange(6.0).view(1, 1, 6)
    kv_compact([cache], int32([[0]]), 6, int32([0]), int32([[0, 2, 3, 4]]), int32([4]))
    assert cache.flatten().tolist() == [0, 2, 3, 4, 4, 5]


def test_a_straight_path_touches_nothing():
    cache = torch.zeros(2, 3, 4, 5)
    version = cache._version
    kv_compact([cache], int32([[2, GARBAGE]]), 4, int32([0]), int32([[0, 1, 2, -1]]), int32([3]))
    kv_compact([cache], int32([[]]).view(0, 0), 4, int32([]), int32([]).view(0, 4), int32([]))
    assert cache._version == version


def test_writes_through_a_cache_that_is_a_view():
    """Keys and values in one tensor [layers, 2, pages, page]: each half is not contiguous as a whole."""
    both = torch.arange(2 * 2 * 4, dtype=torch.float32).view(2, 2, 1, 4)
    kv_compact([both[:, 0], both[:, 1]], int32([[0]]), 4, int32([1]), int32([[0, 2]]), int32([2]))
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
