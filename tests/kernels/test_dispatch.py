"""The choice of an implementation by device."""

from __future__ import annotations

import logging

import pytest
import torch

from ddtree.kernels import dispatch, reference, topk_logprobs


def test_cpu_uses_the_reference():
    assert dispatch.implementation(torch.device("cpu")) is reference


def test_cuda_says_once_that_it_uses_the_reference(caplog):
    dispatch._cuda.cache_clear()
    with caplog.at_level(logging.WARNING):
        for index in (0, 1, 0):
            assert dispatch.implementation(torch.device("cuda", index)) is reference
    assert len(caplog.records) == 1


def test_another_device_is_refused():
    with pytest.raises(ValueError, match="No kernels for device type 'meta'; move the tensors to one of: cpu, cuda"):
        topk_logprobs(torch.zeros(1, 4, device="meta"), 2)
