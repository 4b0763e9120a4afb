"""A one-sided tensor transport for CPU tensors of one node: every RDT object is one file in shared memory.

One-sided, so that either end may die without the other: with a two-sided transport Ray takes the peer down as well.

The sender writes the file, each receiver maps it copy-on-write, Ray tells the sender when nobody refers to the object any
more. A sender that was killed leaves files behind; the next one to start on the node removes them.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from ray.experimental import register_tensor_transport
from ray.experimental.rdt import CommunicatorMetadata, TensorTransportManager, TensorTransportMetadata

NAME = "SHM"
ALIGNMENT = 64  # bytes; a cache line, and enough for every dtype


def register() -> None:
    """Register the transport with Ray in this process, once. Call it in the constructor of every actor that sends or receives:
    actors are pickled by value, so nothing that runs at import time can be relied on."""
    try:
        register_tensor_transport(NAME, ["cpu"], ShmTransport, torch.Tensor)
    except ValueError as error:
        if "already" not in str(error):
            raise


@dataclass
class ShmMetadata(TensorTransportMetadata):
    """Where the tensors of one object lie."""

    path: str = ""
    offsets: list[int] = field(default_factory=list)  # bytes from the start of the file, by tensor


@dataclass
class ShmCommunicator(CommunicatorMetadata):
    """Nothing: a path is all a receiver needs."""


class ShmTransport(TensorTransportManager):
    """Ray makes one per process."""

    def __init__(self) -> None:
        root = _root()
        root.mkdir(mode=0o700, exist_ok=True)
        _sweep(root)
        self._folder = root / str(os.getpid())
        self._folder.mkdir(mode=0o700, exist_ok=True)

    def tensor_transport_backend(self) -> str:
        return NAME

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> ShmMetadata:
        """Write the tensors, any shape and dtype, into a new file."""
        offsets, size = [], 0
        for tensor in rdt_object:
            offsets.append(size)
            size += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        path = self._folder / obj_id
        with open(path, "w+b") as file:
            file.truncate(max(size, 1))
            with mmap.mmap(file.fileno(), 0) as memory:
                for tensor, offset in zip(rdt_object, offsets, strict=True):
                    data = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
                    memory[offset : offset + len(data)] = data  # not torch's copy: it would start an OpenMP pool here
        meta = [(tensor.shape, tensor.dtype) for tensor in rdt_object]
        return ShmMetadata(tensor_meta=meta, tensor_device="cpu", path=str(path), offsets=offsets)

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> ShmCommunicator:
        return ShmCommunicator()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Any,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        """Map the file; the tensors are views of it and keep it alive. Writing to them changes this process's copy only."""
        meta: ShmMetadata = tensor_transport_metadata
        with open(meta.path, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return [
            _view(memory, offset, tuple(shape), dtype)
            for (shape, dtype), offset in zip(meta.tensor_meta, meta.offsets, strict=True)
        ]

    def send_multiple_tensors(
        self, tensors: list[Any], tensor_transport_metadata: Any, communicator_metadata: Any
    ) -> None:
        raise NotImplementedError("one-sided: the receiver reads")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: list[Any]) -> None:
        Path(tensor_transport_meta.path).unlink(missing_ok=True)

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """Nothing to stop: a read is one mapping."""


def _root() -> Path:
    shared = Path("/dev/shm")  # a RAM disk on Linux; elsewhere the page cache serves
    return (shared if shared.is_dir() else Path(tempfile.gettempdir())) / f"ddtree-{os.getuid()}"


def _sweep(root: Path) -> None:
    """Remove the folders of senders that are gone."""
    for folder in root.iterdir():
        try:
            os.kill(int(folder.name), 0)
        except (ProcessLookupError, ValueError):
            shutil.rmtree(folder, ignore_errors=True)
        except PermissionError:
            pass


def _view(memory: mmap.mmap, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = 1
    for n in shape:
        count *= n
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
