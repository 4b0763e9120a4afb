"""What compute-sanitizer runs on a GPU does not fail by itself: the same calls on the CUDA sources, emulated."""

from __future__ import annotations

import pytest
import torch

from . import sanitizer
from .emulation import compiler, emulated


@pytest.mark.skipif(not compiler(), reason="emulating CUDA sources takes a C++ compiler")
@pytest.mark.parametrize("run", [sanitizer.topk, sanitizer.noise, sanitizer.trees, sanitizer.compact])
def test_results_are_those_of_the_reference(run, monkeypatch):
    monkeypatch.setattr(sanitizer, "DEVICE", torch.device("cpu"))
    with emulated():
        run()
