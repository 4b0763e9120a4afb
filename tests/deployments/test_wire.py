"""Messages arrive as they were sent, whatever tensors are in them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ddtree.deployments import wire

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
]


@dataclass(frozen=True)
class Message:
    tensors: tuple[Tensor, ...]
    inner: Message | None
    name: str


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    made = torch.randint(0, 2, shape).to(draw(st.sampled_from(DTYPES)))
    return made.transpose(0, -1) if draw(st.booleans()) and made.dim() > 1 else made


@given(st.lists(tensors(), max_size=6), st.text())
def test_a_message_arrives_as_it_was(given_tensors: list[Tensor], name: str) -> None:
    sent = Message(tuple(given_tensors), Message((), None, "inner"), name)
    got = wire.loads(wire.dumps(sent))
    assert (got.name, got.inner) == (name, sent.inner)
    for mine, theirs in zip(sent.tensors, got.tensors, strict=True):
        assert (theirs.dtype, theirs.shape) == (mine.dtype, mine.shape) and torch.equal(theirs, mine)
        theirs.fill_(1)  # its own memory


def test_a_placed_tensor_is_found_again() -> None:
    kept = [torch.arange(3), torch.ones(2)]
    data = wire.dumps(kept, lambda tensor: 1 if tensor is kept[1] else None)
    got = wire.loads(data, lambda place, shape, dtype: kept[place])
    assert got[1] is kept[1] and torch.equal(got[0], kept[0])
    with pytest.raises(ValueError, match="a place that is not known here"):
        wire.loads(data)


def test_numbers_are_read_when_all_tensors_were_placed() -> None:
    numbers, seen = torch.zeros(3), []

    def ready() -> None:
        assert seen == [3, 2]
        numbers.fill_(5)

    data = wire.dumps([numbers, torch.ones(2)], lambda tensor: seen.append(len(tensor)), ready)
    assert wire.loads(data)[0].tolist() == [5, 5, 5]
