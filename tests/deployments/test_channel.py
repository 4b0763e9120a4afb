"""Calls over a Unix socket: values and errors come back, and no death or hang of the other end keeps a caller waiting."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddtree.deployments.channel import Caller, CallFailed, results

SERVER = """
import pathlib, sys, threading, time
from ddtree.deployments.channel import Server
from ddtree.deployments.device_thread import DeviceThread

noted = []

def handle(method, *args):
    if method == "note":
        noted.append(args)
    if method == "noted":
        return noted
    if method == "sleep":
        time.sleep(*args)
    if method == "raise":
        raise ValueError("no such thing")
    if method == "end":
        raise ConnectionAbortedError("the process is ending")
    return threading.current_thread().name if method == "thread" else args

thread = DeviceThread(float(sys.argv[2]))
thread.run(Server, pathlib.Path(sys.argv[1]), handle, thread)
print("listening", flush=True)
sys.stdin.readline()
"""


@dataclass(frozen=True)
class Started:
    path: Path
    process: subprocess.Popen[bytes]
    awake_s: float

    def caller(self, timeout_s: float = 20) -> Caller:
        return Caller(self.path, timeout_s, self.awake_s)

    def end(self) -> None:
        """In good order: its main thread is done."""
        assert self.process.stdin
        self.process.stdin.close()


@pytest.fixture(params=[0, 0.005], ids=["asleep", "awake"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Started]]:
    """Starts servers."""
    started: list[Started] = []

    def begin() -> Started:
        path = tmp_path / f"calls-{len(started)}"
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(path), str(request.param)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        started.append(Started(path, process, request.param))
        assert process.stdout and process.stdout.readline() == b"listening\n"
        return started[-1]

    yield begin
    for server in started:
        server.process.kill()
        server.process.wait()


@pytest.fixture
def server(start: Callable[[], Started]) -> Started:
    return start()


def call(caller: Caller, method: str, *args: Any) -> Any:
    caller.start(method, *args)
    return caller.result()


def test_values_and_errors_come_back(server: Started) -> None:
    caller = server.caller()
    assert call(caller, "echo", 1, "two") == (1, "two")
    with pytest.raises(CallFailed, match="ValueError: no such thing"):
        call(caller, "raise")
    large = bytes(3_000_000)
    assert call(caller, "echo", large) == (large,), "and the connection is still good"
    assert call(caller, "thread") == call(server.caller(), "thread") == "device"


def test_an_end_in_good_order_is_no_failed_call(server: Started) -> None:
    with pytest.raises(ConnectionResetError):
        call(server.caller(), "end")
    caller, idle = server.caller(), server.caller()
    assert call(caller, "echo") == call(idle, "echo") == ()
    caller.start("sleep", 1)
    time.sleep(0.1)
    server.end()
    assert caller.result() == (1,), "what has begun is finished"
    with pytest.raises((ConnectionResetError, BrokenPipeError)):
        call(idle, "echo")
    assert server.process.wait(5) == 0


def test_a_death_is_known_at_once(server: Started) -> None:
    caller = server.caller(60)
    caller.start("sleep", 60)
    os.kill(server.process.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(ConnectionResetError):
        caller.result()
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("size", [0, 50_000_000])
def test_a_hang_ends_at_the_deadline(server: Started, size: int) -> None:
    caller = server.caller(0.5)
    os.kill(server.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, server.process.pid, os.WSTOPPED | os.WNOWAIT)  # it may be answering still
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        call(caller, "echo", bytes(size))
    assert 0.4 < time.monotonic() - started < 3
    os.kill(server.process.pid, signal.SIGCONT)
    with pytest.raises(OSError, match="Bad file"):
        call(caller, "echo")


def test_one_caller_keeps_no_other_waiting(server: Started) -> None:
    """One stops in the middle of a message, one takes no answer, one is gone, one sends nonsense."""
    half, deaf, gone, foreign = (socket.socket(socket.AF_UNIX) for _ in range(4))
    for other in (half, deaf, gone, foreign):
        other.connect(str(server.path))
    half.sendall((100).to_bytes(8, "little") + b"half")
    message = pickle.dumps((True, "echo", (bytes(5_000_000),)))
    deaf.sendall(len(message).to_bytes(8, "little") + message)
    gone.sendall(len(message).to_bytes(8, "little") + message)
    gone.close()
    foreign.sendall((4).to_bytes(8, "little") + b"what")
    assert call(server.caller(5), "echo", 1) == (1,)
    assert foreign.recv(1) == b""
    with deaf.makefile("rb") as answer:
        assert pickle.loads(answer.read(int.from_bytes(answer.read(8), "little"))).value == (bytes(5_000_000),)
    assert call(server.caller(5), "echo", 2) == (2,)


def test_a_notice_is_taken_before_the_next_call_and_not_answered(server: Started) -> None:
    caller = server.caller()
    for i in range(3):
        caller.notify("note", i, bytes(100_000))
        caller.notify("raise")
        caller.notify("note", "small")
        assert [args[0] for args in call(caller, "noted")] == [0, "small", 1, "small", 2, "small"][: 2 * i + 2]


def test_of_many_the_first_failure_ends_the_wait(start: Callable[[], Started]) -> None:
    callers = [start().caller() for _ in range(3)]
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
