"""NVIDIA's Multi-Process Service for the time of a block. The processes that share a GPU then take turns in 20 µs instead of 150.

Has a control daemon of its own, in a folder of its own, and ends that one. Knows no service.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Generator

CONTROL = "nvidia-cuda-mps-control"
WAIT_S = 20


@contextlib.contextmanager
def multi_process_service() -> Generator[None, None, None]:
    """Every process that is started meanwhile uses it. The daemon itself is told of no CUDA_VISIBLE_DEVICES: it would count the
    GPUs anew, and the numbers that its clients have would be others.

    Raises: OSError, subprocess.SubprocessError where it is not installed or does not start.
    """
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        names = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(names)
        try:
            everything = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
            subprocess.run([CONTROL, "-d"], check=True, timeout=WAIT_S, env=everything)
            try:
                yield
            finally:
                subprocess.run(
                    [CONTROL], input="quit\n", text=True, check=True, timeout=WAIT_S, stdout=subprocess.DEVNULL
                )
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
