"""The choice of an implementation by device."""

from __future__ import annotations

import logging

import pytest
import torch

from ddtree.kernels import build, cuda, dispatch, reference, topk_logprobs


def test_cpu_uses_the_reference():
    assert dispatch.implementation(torch.device("cpu")) is reference


@pytest.fixture
def fresh_choice():
    """Forgets which implementation was chosen for CUDA, before and after."""
    for cached in (dispatch._cuda, cuda.library):
        cached.cache_clear()
    yield
    for cached in (dispatch._cuda, cuda.library):
        cached.cache_clear()


def test_cuda_without_a_compiler_says_once_that_it_uses_the_reference(fresh_choice, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        for index in (0, 1, 0):
            assert dispatch.implementation(torch.device("cuda", index)) is reference
    assert [record.args[0].args[0] for record in caplog.records] == [
        "nvcc was not found; install the CUDA toolkit (12.8 or newer) or set CUDA_HOME."
    ]


if torch.cuda.is_available():  # so that no test of the CUDA kernels can pass on the reference

    def test_cuda_uses_the_library():
        assert dispatch.implementation(torch.device("cuda")) is cuda


def test_another_device_is_refused():
    with pytest.raises(ValueError, match="No kernels for device type 'meta'; move the tensors to one of: cpu, cuda"):
        topk_logprobs(torch.zeros(1, 4, device="meta"), 2)
