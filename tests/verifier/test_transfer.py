"""Messages of a step on their way to the device. `cpu:0` is another device than `cpu` here, so this runs without a GPU."""

import numpy as np
import pytest
import torch

from ddtree.verifier.transfer import to_device

DEVICES = [
    "cpu:0",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


@pytest.mark.parametrize("name", DEVICES)
def test_every_shape_and_dtype_arrives(name: str) -> None:
    numbers = np.arange(12)
    sent = (
        torch.from_numpy(numbers.astype(np.int32)).view(3, 4).t(),  # not contiguous
        torch.from_numpy(np.array([], np.int32)),  # stride 0
        torch.from_numpy(numbers % 2 == 0),
        torch.from_numpy(numbers)[5:6],
        torch.tensor(1.5),
        torch.zeros(0, 3),
        "no tensor",
    )
    arrived = to_device(sent, torch.device(name))
    for before, after in zip(sent, arrived, strict=True):
        if isinstance(before, str):
            assert after == before
            continue
        assert after.dtype == before.dtype and after.shape == before.shape
        assert torch.equal(after.cpu(), before)


def test_what_is_there_already_is_not_copied() -> None:
    here = torch.arange(3)
    assert to_device((here, "x"), here.device)[0] is here
