"""All calls of a process run one after another on one thread, and only they count as its work."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddtree.deployments import polling
from ddtree.deployments.device_thread import DeviceThread

ENDING = """
import sys, threading
from ddtree.deployments.device_thread import DeviceThread

thread = DeviceThread()

def call_after_the_end():
    threading.main_thread().join()
    while True:  # until the thread knows of the end, too
        try:
            thread.run(int)
        except ConnectionAbortedError as error:
            return print(error, flush=True)

threading.Thread(target=call_after_the_end).start()
"""

RESTING = """
import os
import torch
from ddtree.deployments.device_thread import DeviceThread
from ddtree.deployments.openmp import end_threads

def threads_left(thread):
    a = torch.ones(512, 512)
    there = len(os.listdir("/proc/self/task"))
    for _ in range(2):  # the pool is made anew
        assert thread.run(lambda: float((a @ a).sum())) == 512**3
        thread.run(int)  # comes after the rest
    return len(os.listdir("/proc/self/task")) - there

torch.set_num_threads(2)
end_threads()  # no pool yet
print(threads_left(DeviceThread()), threads_left(DeviceThread(rest=end_threads)))
"""


@pytest.fixture(scope="module", params=[0, 0.005], ids=["asleep", "awake"])
def thread(request: pytest.FixtureRequest) -> DeviceThread:
    return DeviceThread(request.param)


def test_results_and_errors_come_back(thread: DeviceThread) -> None:
    assert thread.run(divmod, 17, 5) == (3, 2)
    with pytest.raises(ZeroDivisionError):
        thread.run(divmod, 1, 0)
    with pytest.raises(SystemExit):
        thread.run(sys.exit)
    assert thread.run(threading.get_ident) == thread.run(threading.get_ident) != threading.get_ident()


def test_one_call_at_a_time(thread: DeviceThread) -> None:
    running, most = 0, 0

    def call(i: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.001)
        running -= 1
        return i

    with ThreadPoolExecutor(8) as callers:
        assert list(callers.map(lambda i: thread.run(call, i), range(100))) == list(range(100))
    assert most == 1


def test_a_watched_file_and_calls_share_the_thread(thread: DeviceThread) -> None:
    here, there = socket.socketpair()
    got: list[tuple[bytes, int]] = []
    thread.run(thread.watch, there, lambda: got.append((there.recv(9), threading.get_ident())))
    for i in range(3):
        here.send(b"%d" % i)
        while len(got) <= i:
            time.sleep(0.001)
    assert got == [(b"%d" % i, thread.run(threading.get_ident)) for i in range(3)]
    thread.run(thread.unwatch, there)
    here.send(b"unseen")
    thread.run(time.sleep, 0.01)
    assert len(got) == 3


def test_only_work_counts(thread: DeviceThread) -> None:
    before, started = thread.busy_seconds, time.perf_counter()
    thread.run(time.sleep, 0.1)
    time.sleep(0.3)
    thread.run(int)  # what the first one took is counted by now
    assert 0.1 <= thread.busy_seconds - before <= time.perf_counter() - started - 0.3


def test_the_end_of_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "the process is ending\n", "")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux lists them")
def test_a_rest_ends_the_threads_that_would_spin() -> None:
    ended = subprocess.run([sys.executable, "-c", RESTING], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "1 0\n"), ended.stderr


@pytest.mark.parametrize("awake_s", [0, 0.05])
def test_polling_finds_what_is_there_and_keeps_to_the_time(awake_s: float) -> None:
    here, there = socket.socketpair()
    with selectors.DefaultSelector() as selector:
        selector.register(there, selectors.EVENT_READ)
        for timeout in (0.02, 0.1):  # shorter and longer than it polls
            started = time.monotonic()
            assert not polling.select(selector, awake_s, timeout)
            assert (
                timeout <= time.monotonic() - started + 0.002 < timeout + 2
            )  # on a machine that has other things to do
        here.send(b"1")
        assert polling.select(selector, awake_s)[0][0].fileobj is there


@pytest.mark.parametrize(("cores", "polls"), [(2, False), (polling.CORES, True)])
def test_few_cores_are_left_to_others(cores: int, polls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert bool(polling.awake_s()) == polls
