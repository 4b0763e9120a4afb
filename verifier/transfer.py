"""The tensors of a step from one device to another, all of them in one copy. Knows no model."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Message = TypeVar("Message")


def to_device(message: Message, device: torch.device) -> Message:
    """`message`, a dataclass or tuple of tensors, other values and such messages, with every tensor on `device`.

    Tensors that are there already are taken as they are. Those of a host travel to a GPU through one pinned buffer, which
    torch gives to nobody else before the copy is done; the host does not wait. It does for those that come from one.
    """
    moved = [tensor for tensor in _tensors(message) if tensor.device != device]
    if not moved:
        return message
    moved.sort(key=lambda tensor: tensor.element_size(), reverse=True)  # so that each begins at a multiple of its size
    host = [_as_bytes(tensor) for tensor in moved]
    sizes = [len(part) for part in host]
    pinned = device.type == "cuda" and moved[0].device.type == "cpu"
    staged = torch.empty(sum(sizes), dtype=torch.uint8, device=moved[0].device, pin_memory=pinned)
    torch.cat(host, out=staged)
    parts = staged.to(device, non_blocking=pinned).split(sizes)
    arrived = {id(x): part.view(x.dtype).view(x.shape) for x, part in zip(moved, parts, strict=True)}
    return _replace(message, arrived)


def to_host(message: Message) -> Message:
    """`message` with the tensors of a GPU copied to pinned memory, where they are when its current stream is done."""
    arrived = {id(x): torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in _tensors(message) if x.is_cuda}
    for tensor in _tensors(message):
        if tensor.is_cuda:
            arrived[id(tensor)].copy_(tensor, non_blocking=True)
    return _replace(message, arrived)


def own(message: Message) -> Message:
    """`message` with copies of its tensors."""
    tensors = _tensors(message)
    return _replace(message, {id(tensor): tensor.clone() for tensor in tensors})


def _as_bytes(tensor: Tensor) -> Tensor:
    if not tensor.numel():  # one that came from numpy has a stride of 0, which cannot be viewed
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.contiguous().view(-1).view(torch.uint8)


def _tensors(message: Any) -> list[Tensor]:
    if isinstance(message, Tensor):
        return [message]
    if isinstance(message, tuple):
        return [tensor for part in message for tensor in _tensors(part)]
    if not is_dataclass(message):
        return []
    return [tensor for field in fields(message) if field.init for tensor in _tensors(getattr(message, field.name))]


def _replace(message: Any, arrived: dict[int, Tensor]) -> Any:
    if isinstance(message, Tensor):
        return arrived.get(id(message), message)
    if isinstance(message, tuple):
        return tuple(_replace(part, arrived) for part in message)
    if not is_dataclass(message) or isinstance(message, type):
        return message
    return replace(message, **{f.name: _replace(getattr(message, f.name), arrived) for f in fields(message) if f.init})
