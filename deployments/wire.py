"""A message with tensors as bytes. Knows pickle, not what is in the message.

torch pickles every tensor as an archive of its own, 50 µs each way; a verify batch has fifteen. Here the numbers of all tensors
lie one after the other behind the pickled rest, or the caller puts something in a tensor's place.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Place = Callable[[Tensor], Any]  # something small that stands for the tensor, or None: its numbers travel
Find = Callable[[Any], Tensor]  # the tensor that this stands for

LENGTH = struct.Struct("<Q")  # of the pickled part, which comes first
ALIGNMENT = 16  # bytes


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, place: Place) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.numbers = bytearray()
        self._place = place

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        if (spot := self._place(value)) is not None:
            return False, spot
        at, here = len(self.numbers), value.cpu()
        if here.dtype == torch.bfloat16:  # which numpy has not
            here = here.view(torch.int16)
        self.numbers += here.numpy().tobytes()
        self.numbers += bytes(-len(self.numbers) % ALIGNMENT)
        return True, (at, tuple(value.shape), value.dtype)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, numbers: bytearray, find: Find | None) -> None:
        super().__init__(file)
        self._numbers, self._find = numbers, find

    def persistent_load(self, pid: Any) -> Tensor:
        inside, spot = pid
        if not inside:
            if self._find is None:
                raise ValueError("the message has tensors in a place that is not known here")
            return self._find(spot)
        at, shape, dtype = spot
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._numbers, dtype=dtype, count=count, offset=at).view(shape)


def dumps(message: Any, place: Place = lambda tensor: None) -> bytes:
    """`message` as bytes. Tensors that are not placed arrive on the CPU."""
    file = io.BytesIO()
    pickler = _Pickler(file, place)
    pickler.dump(message)
    body = file.getvalue()
    return b"".join((LENGTH.pack(len(body)), body, pickler.numbers))


def loads(data: bytes | memoryview, find: Find | None = None) -> Any:
    """The message. Only for bytes that an actor of this application made."""
    (length,) = LENGTH.unpack_from(data)
    body = memoryview(data)[LENGTH.size :]
    return _Unpickler(io.BytesIO(body[:length]), bytearray(body[length:]), find).load()
