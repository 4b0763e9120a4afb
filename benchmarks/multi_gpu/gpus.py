"""What the GPUs of this machine are to each other: who reaches whose memory, and how fast copies between them are.

Run as a program it prints that as JSON: the process that measures holds GPU memory, and ends. Knows no service.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

LARGE, SMALL = 1 << 28, 1 << 12  # bytes of a copy
TURNS = 10


def measure() -> dict[str, Any]:
    """`pairs`: for every two GPUs whether the first reaches the second's memory, GB/s of a large copy to it, and of one in each
    direction at a time together, and µs of a small one. `topology`: what nvidia-smi says of the links."""
    pairs = []
    for i, j in itertools.permutations(range(torch.cuda.device_count()), 2):
        there, back = (_copy(LARGE, i, j), _copy(LARGE, j, i))
        small = _copy(SMALL, i, j)
        pairs.append(
            {
                "from": i,
                "to": j,
                "reaches": torch.cuda.can_device_access_peer(i, j),
                "gb_per_s": LARGE / _seconds([there]) / 1e9,
                "both_gb_per_s": 2 * LARGE / _seconds([there, back]) / 1e9,
                "small_us": 1e6 * _seconds([small]),
            }
        )
    return {"gpus": torch.cuda.device_count(), "pairs": pairs, "topology": _topology()}


def _copy(size: int, source: int, target: int) -> Callable[[], None]:
    data = torch.ones(size, dtype=torch.uint8, device=f"cuda:{source}")
    there = torch.empty_like(data, device=f"cuda:{target}")
    stream = torch.cuda.Stream(source)

    def copy() -> None:
        with torch.cuda.stream(stream):
            there.copy_(data, non_blocking=True)

    return copy


def _seconds(copies: list[Callable[[], None]]) -> float:
    """Of these copies, begun together: the median of three times TURNS of them, after one that is not counted."""
    times = []
    for turns in (1, TURNS, TURNS, TURNS):
        _wait()
        began = time.perf_counter()
        for _ in range(turns):
            for copy in copies:
                copy()
        _wait()
        times.append((time.perf_counter() - began) / turns)
    return median(times[1:])


def _wait() -> None:
    for gpu in range(torch.cuda.device_count()):
        torch.cuda.synchronize(gpu)


def _topology() -> list[str]:
    command = ["nvidia-smi", "topo", "-m"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    table = re.sub(r"\x1b\[[0-9;]*m", "", shown).partition("Legend")[0]
    return [line.rstrip() for line in table.splitlines() if line.strip()]


if __name__ == "__main__":
    print(json.dumps(measure()))
