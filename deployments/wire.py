"""A message with tensors as bytes. Knows pickle, not what is in the message.

torch pickles every tensor as an archive of its own, 50 µs each way; a verify batch has fifteen. Here the numbers of all tensors
lie one after the other behind the pickled rest, or the caller says where a tensor is instead. Python runs for tensors alone:
what pickle offers to look at every object (`persistent_id`) takes longer than all the rest.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

Shape = tuple[int, ...]
Place = Callable[[Tensor], int | None]  # a number that says where the tensor is, or None: its own numbers travel
Find = Callable[[int, Shape, torch.dtype], Tensor]  # the tensor that is there

LENGTH = struct.Struct("<Q")  # of the pickled part, which comes first
ALIGNMENT = 16  # bytes
PADDING = [bytes(-size % ALIGNMENT) for size in range(ALIGNMENT)]  # by size modulo ALIGNMENT
# What travels, and as what: a dtype is its index here. numpy has no bfloat16.
DTYPES: list[tuple[torch.dtype, np.dtype[Any]]] = [
    (torch.float32, np.dtype(np.float32)),
    (torch.float64, np.dtype(np.float64)),
    (torch.float16, np.dtype(np.float16)),
    (torch.bfloat16, np.dtype(np.int16)),
    (torch.int64, np.dtype(np.int64)),
    (torch.int32, np.dtype(np.int32)),
    (torch.int16, np.dtype(np.int16)),
    (torch.int8, np.dtype(np.int8)),
    (torch.uint8, np.dtype(np.uint8)),
    (torch.bool, np.dtype(np.bool_)),
]
CODES = {dtype: code for code, (dtype, _) in enumerate(DTYPES)}


class _Packer:
    """What becomes of a message's tensors."""

    def __init__(self, place: Place | None) -> None:
        self.arrays: list[np.ndarray[Any, Any]] = []  # whose numbers travel
        self._place, self._used = place, 0

    def reduce(self, tensor: Tensor) -> tuple[Any, ...]:
        """For pickle: what to call for this tensor when the message is read."""
        dtype = tensor.dtype
        if self._place and (place := self._place(tensor)) is not None:
            return _Found.there, (place, tuple(tensor.shape), CODES[dtype])
        here = tensor if tensor.is_cpu else tensor.cpu()
        array = (here.view(torch.int16) if dtype is torch.bfloat16 else here).numpy()
        self.arrays.append(array)
        at, size = self._used, array.nbytes
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return _Found.here, (at if size else None, array.shape, CODES[dtype])


class _Found:
    """Makes a message's tensors again. A pickle names its methods as if they were functions."""

    def __init__(self, numbers: bytearray, find: Find | None) -> None:
        self._numbers, self._find = numbers, find

    def here(self, at: int | None, shape: Shape, code: int) -> Tensor:
        dtype, kept = DTYPES[code]
        if at is None:  # numpy's tensors without elements have a stride of 0
            return torch.empty(shape, dtype=dtype)
        tensor = torch.from_numpy(np.ndarray(shape, kept, self._numbers, at))
        return tensor.view(dtype) if dtype is torch.bfloat16 else tensor

    def there(self, place: int, shape: Shape, code: int) -> Tensor:
        if self._find is None:
            raise ValueError("the message has tensors in a place that is not known here")
        return self._find(place, shape, DTYPES[code][0])


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, found: _Found) -> None:
        super().__init__(file)
        self._found = found

    def find_class(self, module: str, name: str) -> Any:
        return getattr(self._found, name.rpartition(".")[2]) if module == __name__ else _global(module, name)


@cache
def _global(module: str, name: str) -> Any:
    """What a pickle names: the classes of messages."""
    return pickle.Unpickler(io.BytesIO()).find_class(module, name)


def dumps(message: Any, place: Place | None = None, ready: Callable[[], None] = lambda: None) -> bytes:
    """`message` as bytes. Tensors that are not placed arrive on the CPU.

    `ready` is called when all tensors were placed, and before the numbers of host tensors are read, which may be on their way
    to there until then. Raises KeyError for a dtype that is none of DTYPES.
    """
    packer, file = _Packer(place), io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = {**copyreg.dispatch_table, Tensor: packer.reduce}
    pickler.dump(message)
    ready()
    body = file.getvalue()
    parts = [LENGTH.pack(len(body)), body]
    for array in packer.arrays:
        parts += array.tobytes(), PADDING[array.nbytes % ALIGNMENT]
    return b"".join(parts)


def loads(data: bytes | memoryview, find: Find | None = None) -> Any:
    """The message; its tensors can be written to and share no memory. Only for bytes that an actor of this application made."""
    (length,) = LENGTH.unpack_from(data)
    body = memoryview(data)[LENGTH.size :]
    return _Unpickler(io.BytesIO(body[:length]), _Found(bytearray(body[length:]), find)).load()


def has_numbers(data: bytes) -> bool:
    """Whether there are tensors in it that are not somewhere else."""
    return len(data) > LENGTH.size + LENGTH.unpack_from(data)[0]
