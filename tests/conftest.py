"""What the tests share: the embedded model and one running deployment of it, both real, both made once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("ddtree", deadline=None)  # a property holds however busy the machine is
settings.load_profile("ddtree")

# Two cores are enough for everything here, and more threads than cores collapse both.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("RAY_worker_niceness", "0")  # by itself Ray gives its workers way to whatever else runs

REPOSITORY = Path(__file__).parents[1]
START_S = 180
EXIT_STATUS = pytest.StashKey[int]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that ask the running deployment."""
    for item in items:
        if "deployment" in getattr(item, "fixturenames", ()):
            item.add_marker("service")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[EXIT_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """A process that had Ray in it ends here. Threads that Serve's handles leave behind use Ray after its shutdown, and once such
    a process crashed in the interpreter's own end, with all tests passed."""
    if "ray" in sys.modules and not hasattr(config, "workerinput") and EXIT_STATUS in config.stash:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[EXIT_STATUS])


@pytest.fixture(scope="session")
def target_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory."""
    from ddtree.verifier.embedded import prepare

    return prepare("smollm2-135m-instruct")


@dataclass(frozen=True)
class Deployment:
    """A service that `ddtree serve` started."""

    url: str
    config: Path
    log: Path  # its output
    pid: int  # of `ddtree serve`; all its processes are descendants


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def deployment(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """configs/smollm2-cpu.yaml in fp32, where speculative output equals plain output to the token."""
    import yaml

    folder = tmp_path_factory.mktemp("deployment")
    document = yaml.safe_load((REPOSITORY / "configs/smollm2-cpu.yaml").read_text())
    args = document["applications"][0]["args"]
    args["target"]["dtype"] = args["drafter"]["dtype"] = "float32"
    args["api"] = {"request_log": True}
    config, log = folder / "config.yaml", folder / "log"
    port = document["http_options"]["port"] = free_port()
    config.write_text(yaml.safe_dump(document))
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "ddtree.deployments.commands.main", "serve", str(config)],
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        deadline = time.monotonic() + START_S
        while "is ready" not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the service did not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        yield Deployment(f"http://127.0.0.1:{port}", config, log, process.pid)
    finally:
        process.terminate()
        process.wait(timeout=90)


@pytest.fixture(scope="session")
def server(deployment: Deployment) -> str:
    """Base URL of the running deployment."""
    return deployment.url
