"""Tensors in files of shared memory, which other processes of the node map. Knows paths and bytes, no Ray and no message.

Every process has a folder of its own. One that was killed leaves files behind; the next one to start removes them.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from math import prod
from pathlib import Path

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; a cache line, and enough for every dtype

_allocated: dict[int, Path] = {}  # address of an `allocate`d tensor → its file


@cache
def own_folder() -> Path:
    """This process's folder. Made, and those of dead processes removed, when it is first asked for."""
    root().mkdir(mode=0o700, exist_ok=True)
    _sweep()
    folder = root() / str(os.getpid())
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def root() -> Path:
    """The folder of this user's processes, closed to others."""
    shared = Path("/dev/shm")  # a RAM disk on Linux; elsewhere the page cache serves
    return (shared if shared.is_dir() else Path(tempfile.gettempdir())) / f"ddtree-{os.getuid()}"


def write(path: Path, tensors: Sequence[Tensor]) -> list[int]:
    """Write CPU tensors, any shape and dtype, into a new file. Returns where each begins, in bytes."""
    offsets, size = [], 0
    for tensor in tensors:
        offsets.append(size)
        size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    with open(path, "w+b") as file:
        file.truncate(max(size, 1))
        with mmap.mmap(file.fileno(), 0) as memory:
            for tensor, offset in zip(tensors, offsets, strict=True):
                data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
                memory[offset : offset + len(data)] = data  # not torch's copy: it would start an OpenMP pool here
    return offsets


def allocate(name: str, size: int) -> Tensor:
    """[size] uint8 zeros in a file of their own, for as long as this process lives. Memory is taken as it is written."""
    path = own_folder() / name
    with open(path, "x+b") as file:
        file.truncate(size)
        tensor = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    _allocated[tensor.data_ptr()] = path
    return tensor


def file_of(tensor: Tensor) -> Path | None:
    """The file of a tensor that `allocate` made, whole; None for any other."""
    return _allocated.get(tensor.data_ptr()) if tensor.dtype == torch.uint8 else None


def view(path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype, *, shared: bool) -> Tensor:
    """A tensor in a file, which it keeps alive. Shared: every write is seen by all who map it; else writing to it changes
    this process's copy only."""
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if shared else mmap.ACCESS_COPY)
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=offset).view(shape)


def _sweep() -> None:
    """Remove the folders of processes that are gone."""
    for folder in root().iterdir():
        try:
            os.kill(int(folder.name), 0)
        except (ProcessLookupError, ValueError):
            shutil.rmtree(folder, ignore_errors=True)
        except PermissionError:
            pass
