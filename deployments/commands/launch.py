"""`ddtree serve`: check a configuration, prepare the model, run `serve run`, say when it answers. Loads no model itself."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml

from ddtree.deployments import models, pods
from ddtree.deployments.api.checks import check
from ddtree.deployments.config import AppConfig, read_document
from ddtree.deployments.errors import ConfigError

START_S = 300  # weights of a large target take minutes; a laptop's small one takes seconds
STOP_S = 25
PORT = 8000


def run_forever(
    config_path: Path,
    port: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    ready: Callable[[str, str], None] | None = None,
) -> int:
    """Serve `config_path` until interrupted. Returns the exit code of `serve run`.

    Args:
        config_path: a Serve config file with one application.
        port: instead of the file's `http_options.port`.
        progress: told of the embedded model's preparation (name, done, total).
        ready: called once with (base URL, model name) when requests are answered.

    Raises:
        ConfigError: the configuration cannot work, or the service does not come up; nothing is left running.
    """
    config, document = checked(config_path, progress)
    http = document.setdefault("http_options", {})
    http.setdefault("host", "127.0.0.1")
    http["port"] = port or http.get("port", PORT)
    url = f"http://{http['host']}:{http['port']}"
    _check_port(http["host"], http["port"])
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", prefix="ddtree-") as file:
        yaml.safe_dump(document, file)
        file.flush()
        # A session of its own, so that Ctrl-C reaches us alone and the child is asked to stop once, by _stop.
        child = subprocess.Popen(
            [sys.executable, "-m", "ray.serve.scripts", "run", file.name],
            env=_environment(),
            start_new_session=True,
            preexec_fn=_listen_to_interrupts,
        )
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            _wait(child, url, config.drafter.checkpoint is not None)
            if ready:
                ready(url, models.find(config).served_name)
            return child.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            _stop(child)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _listen_to_interrupts() -> None:
    """In the child: what a shell starts in the background ignores them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Serve shuts its application down, and Ray its local cluster."""
    for send in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if child.poll() is not None:
            return
        child.send_signal(send)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=STOP_S)


def checked(
    config_path: Path, progress: Callable[[str, int, int], None] | None = None
) -> tuple[AppConfig, dict[str, Any]]:
    """The configuration and the whole Serve document, after everything named was found and fits. Raises ConfigError."""
    document = read_document(config_path)
    config = AppConfig.parse(document["applications"][0].get("args"), str(config_path))
    config.default_budget(pods.user_config(document, "Ingress"))
    number = pods.count(document, str(config_path), config.drafter.checkpoint is not None)
    _check_gpus(number * config.gpus_needed, config_path)
    check(config.api)
    models.find(config, progress)
    return config, document


def _check_gpus(needed: int, path: Path) -> None:
    here = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if needed > here:
        need = f"{needed} GPU{'s' if needed > 1 else ''}"
        raise ConfigError(f"{path} needs {need}, and this machine has {here or 'none'}; `ddtree plan` says what for")


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another with --port"
            ) from None


def _environment() -> dict[str, str]:
    """Ray's own telemetry off unless the user has an opinion."""
    return {"RAY_USAGE_STATS_ENABLED": "0", **os.environ}


def _wait(child: subprocess.Popen[bytes], url: str, drafting: bool) -> None:
    """Block until the service answers, with a drafter if it is to have one."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise ConfigError(
                f"`serve run` ended with code {child.returncode} before the service was up; see its output above"
            )
        try:
            health = httpx.get(f"{url}/health", timeout=5)
            if health.status_code == 200 and (health.json()["drafters"] or not drafting):
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise ConfigError(f"the service did not answer at {url} within {START_S} s; see its output above")
