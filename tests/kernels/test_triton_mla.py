"""The Triton baseline of verify_attn_mla: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECKS = Path(__file__).with_name("triton_mla_checks.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed; the test extra has it")
def test_the_checks_pass() -> None:
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS)]
    done = subprocess.run(command, env=os.environ | interpret, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
