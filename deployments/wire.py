"""A message with tensors as bytes. Knows pickle, not what is in the message.

torch pickles every tensor as an archive of its own, 50 µs each way per tensor; a verify batch has thirteen. Here a tensor goes as
the numpy array it is, which makes a batch four times cheaper to send (docs/experiments.md), or as what the caller puts in its
place.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Place = Callable[[Tensor], Any]  # something small that stands for the tensor, or None: it goes as its numbers
Find = Callable[[Any], Tensor]  # the tensor that this stands for


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table.copy()

    def __init__(self, file: io.BytesIO, place: Place) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._place = place

    def persistent_id(self, value: Any) -> Any:
        return self._place(value) if isinstance(value, Tensor) else None


_Pickler.dispatch_table[Tensor] = lambda tensor: (torch.from_numpy, (tensor.cpu().numpy(),))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, find: Find) -> None:
        super().__init__(file)
        self._find = find

    def persistent_load(self, pid: Any) -> Tensor:
        return self._find(pid)


def dumps(message: Any, place: Place = lambda tensor: None) -> bytes:
    """`message` as bytes. Tensors that are not placed arrive on the CPU and have a dtype that numpy knows (bfloat16 has none)."""
    buffer = io.BytesIO()
    _Pickler(buffer, place).dump(message)
    return buffer.getvalue()


def loads(data: bytes | memoryview, find: Find | None = None) -> Any:
    """The message. Only for bytes that an actor of this application made."""
    return pickle.loads(data) if find is None else _Unpickler(io.BytesIO(data), find).load()
