"""The Triton kernels against their references, in Triton's interpreter; on a GPU run kernel_checks.py itself."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("kernel_checks.py")


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not in the CPU build of torch; runs where it is"
)
def test_kernels_equal_their_references() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(CHECKS), "cpu"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
