"""Calls over a Unix socket: values and errors come back, and no death or hang of the other end keeps a caller waiting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddtree.deployments.channel import Caller, CallFailed, results

SERVER = """
import pathlib, sys, time
from ddtree.deployments.channel import Server

def handle(method, *args):
    if method == "sleep":
        time.sleep(*args)
    if method == "raise":
        raise ValueError("no such thing")
    if method == "end":
        raise ConnectionAbortedError("the process is ending")
    return args

Server(pathlib.Path(sys.argv[1]), handle)
print("listening", flush=True)
time.sleep(600)
"""


Started = tuple[Path, "subprocess.Popen[bytes]"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Started]:
    path = tmp_path / "calls"
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout and process.stdout.readline() == b"listening\n"
    yield path, process
    process.kill()
    process.wait()


def call(caller: Caller, method: str, *args: Any) -> Any:
    caller.start(method, *args)
    return caller.result()


def test_values_and_errors_come_back(server: Started) -> None:
    caller = Caller(server[0], 10)
    assert call(caller, "echo", 1, "two") == (1, "two")
    with pytest.raises(CallFailed, match="ValueError: no such thing"):
        call(caller, "raise")
    large = bytes(3_000_000)
    assert call(caller, "echo", large) == (large,), "and the connection is still good"


def test_an_end_in_good_order_is_no_failed_call(server: Started) -> None:
    with pytest.raises(ConnectionResetError):
        call(Caller(server[0], 10), "end")
    assert call(Caller(server[0], 10), "echo") == ()


def test_a_death_is_known_at_once(server: Started) -> None:
    caller = Caller(server[0], 60)
    caller.start("sleep", 60)
    os.kill(server[1].pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(ConnectionResetError):
        caller.result()
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("size", [0, 50_000_000])
def test_a_hang_ends_at_the_deadline(server: Started, size: int) -> None:
    caller = Caller(server[0], 0.5)
    os.kill(server[1].pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        call(caller, "echo", bytes(size))
    assert 0.4 < time.monotonic() - started < 3
    os.kill(server[1].pid, signal.SIGCONT)
    with pytest.raises(OSError, match="Bad file"):
        call(caller, "echo")


def test_of_many_the_first_failure_ends_the_wait(server: Started) -> None:
    callers = [Caller(server[0], 20) for _ in range(3)]
    for i, caller in enumerate(callers):
        caller.start("echo", i)
    assert results(callers) == [(0,), (1,), (2,)]
    callers[0].start("sleep", 10)
    callers[1].start("raise")
    started = time.monotonic()
    with pytest.raises(CallFailed):
        results(callers[:2])
    assert time.monotonic() - started < 2
    with pytest.raises(OSError, match="Bad file"):  # its answer would be taken for that of the next call
        callers[0].start("echo")
    assert call(callers[1], "echo") == ()


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        Caller(tmp_path / "nobody", 1)
