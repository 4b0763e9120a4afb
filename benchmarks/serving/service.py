"""The service as a child process: started with a configuration on a free port, ended with the block. Knows no benchmark."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import httpx

from ddtree.deployments.commands.client import ServerError, get_json

HOST = "127.0.0.1"
STOP_S = 90  # `ddtree serve` gives its own child three times 25 s


class Failed(RuntimeError):
    """A child process did not do its work; the message ends with the last lines that it printed."""

    def __init__(self, what: str, log: Path) -> None:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        super().__init__("\n".join([f"{what}; its output is in {log}", *lines[-12:]]))


@contextlib.contextmanager
def serving(config: Path, log: Path, *, drafting: bool) -> Generator[str, None, None]:
    """Serve `config` and yield the address once requests are answered, by drafts too where `drafting`.

    Raises:
        Failed: the service ended, which it does by itself where it does not come up in time.
    """
    port = _free_port()
    command = [sys.executable, "-m", "ddtree.deployments.commands.main", "serve", str(config), "--port", str(port)]
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        url = f"http://{HOST}:{port}"
        _wait(child, url, log, drafting)
        yield url
    finally:
        _stop(child)


def run_child(command: Sequence[str], log: Path, timeout_s: float) -> None:
    """Run a command to its end. Raises Failed where it fails or takes longer."""
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        code = child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise Failed(f"ended after {timeout_s:.0f} s", log) from None
    finally:
        _stop(child)
    if code:
        raise Failed(f"exit code {code}", log)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(child: subprocess.Popen[bytes], url: str, log: Path, drafting: bool) -> None:
    with httpx.Client(base_url=url, timeout=5) as client:
        while child.poll() is None:
            with contextlib.suppress(ServerError):
                if get_json(client, "/health")["drafters"] or not drafting:
                    return
            time.sleep(0.5)
    raise Failed(f"the service ended with code {child.returncode}", log)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End our own child, which ends what it started; nothing where it has ended. Signals to us wait meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGTERM})
    try:
        if child.poll() is None:
            child.terminate()
            child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
