"""A one-sided tensor transport between processes of one node: Ray Direct Transport moves names of memory, receivers map it.

One-sided, so that either end may die without the other: with a two-sided transport Ray takes the peer down as well.

A CPU tensor is written to a file of shared memory; one that lies in such a file already (`shared_memory.allocate`) is passed by
reference, and so is every CUDA tensor, as an IPC handle. Ray's own CUDA_IPC wants both ends on one GPU; a handle opens on any
GPU of the node that reaches the first, so this one does not care. Ray says when nobody refers to an object any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from ray.experimental import register_tensor_transport
from ray.experimental.rdt import CommunicatorMetadata, TensorTransportManager, TensorTransportMetadata
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from ddtree.deployments import shared_memory

NAME = "NODE"
_DEVICE = 6  # place of the device index among the arguments of torch's rebuild_cuda_tensor


def register() -> None:
    """Register the transport with Ray in this process, once. Call it in the constructor of every actor that sends or receives:
    actors are pickled by value, so nothing that runs at import time can be relied on."""
    try:
        register_tensor_transport(NAME, ["cpu", "cuda"], NodeTransport, Tensor)
    except ValueError as error:
        if "already" not in str(error):
            raise


@dataclass(frozen=True)
class InFile:
    """A tensor in shared memory."""

    path: Path
    offset: int  # bytes
    shared: bool  # writes of the owner are seen; else it is a copy that nobody changes

    def open(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return shared_memory.view(self.path, self.offset, shape, dtype, shared=self.shared)


@dataclass(frozen=True)
class OnGpu:
    """A CUDA tensor of the sender: what torch rebuilds it from in another process."""

    handle: tuple[Any, ...]

    def open(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Mapped for this process's own GPU, which reads the memory through NVLink or PCIe where it is another's."""
        here = (*self.handle[:_DEVICE], torch.cuda.current_device(), *self.handle[_DEVICE + 1 :])
        tensor: Tensor = rebuild_cuda_tensor(*here)
        return tensor


@dataclass
class NodeMetadata(TensorTransportMetadata):
    """Where the tensors of one object lie."""

    places: list[InFile | OnGpu] = field(default_factory=list)  # by tensor
    file: Path | None = None  # goes with the object


@dataclass
class NodeCommunicator(CommunicatorMetadata):
    """Nothing: a place is all a receiver needs."""


class NodeTransport(TensorTransportManager):
    """Ray makes one per process."""

    def __init__(self) -> None:
        self._folder = shared_memory.own_folder()

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

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> NodeMetadata:
        """Name the place of every tensor; CPU tensors that have none are written to a file. What a GPU is to hold must be
        complete when an actor's method returns it: receivers wait for no stream."""
        loose = [t for t in rdt_object if t.device.type == "cpu" and not shared_memory.file_of(t)]
        path = self._folder / obj_id
        offsets = iter(shared_memory.write(path, loose)) if loose else iter(())
        places: list[InFile | OnGpu] = []
        for tensor in rdt_object:
            if tensor.is_cuda:
                places.append(OnGpu(reduce_tensor(tensor)[1]))
            elif file := shared_memory.file_of(tensor):
                places.append(InFile(file, 0, shared=True))
            else:
                places.append(InFile(path, next(offsets), shared=False))
        return NodeMetadata(
            tensor_meta=[(tensor.shape, tensor.dtype) for tensor in rdt_object],
            tensor_device="cpu",  # a formality: an object may have tensors on both
            places=places,
            file=path if loose else None,
        )

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> NodeCommunicator:
        return NodeCommunicator()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Any,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        """The tensors, as views of the sender's memory, which they keep mapped."""
        meta: NodeMetadata = tensor_transport_metadata
        return [place.open(tuple(s), dtype) for place, (s, dtype) in zip(meta.places, meta.tensor_meta, strict=True)]

    def send_multiple_tensors(
        self, tensors: list[Any], tensor_transport_metadata: Any, communicator_metadata: Any
    ) -> None:
        raise NotImplementedError("one-sided: the receiver reads")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: list[Any]) -> None:
        if tensor_transport_meta.file:
            tensor_transport_meta.file.unlink(missing_ok=True)

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        """Nothing to stop: a read is one mapping."""
