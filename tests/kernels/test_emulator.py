"""The emulator that the kernels' tests run on knows threads that are stuck from threads that only wait for each other."""

import subprocess
from pathlib import Path

import pytest

from .emulation import EMULATOR, FLAGS, compiler


@pytest.mark.skipif(not compiler(), reason="needs g++ 12 or newer, on Linux, which the emulator is compiled with")
def test_it_knows_a_deadlock(tmp_path: Path) -> None:
    ring = tmp_path / "ring"
    sources = (EMULATOR / "scheduler.cpp", EMULATOR / "token_ring.cpp")
    subprocess.run(["g++", *FLAGS, *sources, "-o", ring], check=True)

    def told(*arguments: str) -> str:
        return subprocess.run([ring, *arguments], capture_output=True, text=True, check=True, timeout=60).stdout

    assert told() == "1200 passed: done\n"
    stuck = "0 passed: deadlock: 384 threads spin, 0 wait for their warp, 0 at barriers\n"
    assert told("nobody") == stuck
