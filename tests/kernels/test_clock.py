"""The clock counts what is marked and nothing else."""

from __future__ import annotations

import time

import pytest
import torch

from ddtree.kernels.clock import DeviceClock


def test_what_is_marked_counts_and_nothing_else() -> None:
    clock = DeviceClock(torch.device("cpu"))
    with clock:
        time.sleep(0.01)
    assert clock.seconds == 0, "nobody had asked"
    began = time.perf_counter()
    for _ in range(3):
        with clock:
            time.sleep(0.02)
        time.sleep(0.05)
    assert 0.06 <= clock.seconds <= time.perf_counter() - began - 0.15


def test_a_part_that_fails_counts_too() -> None:
    clock = DeviceClock(torch.device("cpu"))
    assert clock.seconds == 0
    with pytest.raises(ZeroDivisionError), clock:
        time.sleep(0.01)
        _ = 1 / 0
    assert clock.seconds >= 0.01


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_not_waited_for() -> None:
    clock = DeviceClock(torch.device("cuda"))
    assert clock.seconds == 0
    torch.cuda._sleep(1)  # what is made at the first launch
    began = time.perf_counter()
    for _ in range(4):
        with clock:
            torch.cuda._sleep(200_000_000)  # cycles, a tenth of a second
    assert time.perf_counter() - began < 0.1
    torch.cuda.synchronize()
    whole = time.perf_counter() - began
    with clock:
        pass
    assert 0.9 * whole < clock.seconds <= whole
