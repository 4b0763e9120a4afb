"""Messages whose tensors stay in their sender's memory: the sender writes them into an arena that its readers have mapped.

An arena is two halves, written in turn, so a message can be read until its sender has written two more. What travels is a
letter: a few bytes, the message with places in the arena instead of tensors. Small CPU tensors travel inside. A header in host
memory says which message each half holds; reading one that is gone raises an error instead of giving other numbers.
Knows memory, not how arenas and letters reach a reader.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ddtree.deployments import shared_memory, wire

ALIGNMENT = 256  # bytes; what the widest loads of a kernel want
INLINE = 4096  # bytes; a CPU tensor below this travels in the letter
WRITING = 0  # in the header: the half is being written; messages count from 1

Spot = tuple[int, tuple[int, ...], torch.dtype]  # bytes from the start of the half, shape, dtype


class StaleMessage(RuntimeError):
    """The memory of a message holds another one by now."""


class MessageTooLarge(ValueError):
    """A message does not fit its sender's outbox."""


@dataclass(frozen=True)
class Bound:
    """The largest message that an outbox is to hold."""

    size: int  # bytes
    limit: str  # where the number comes from, for who reads the error


@dataclass(frozen=True)
class Arena:
    """What readers map. Written by its outbox."""

    owner: str  # no two outboxes have the same
    header: Tensor  # 16 bytes of shared host memory: two int64, the number of the message in each half
    data: Tensor  # [2 · bytes of a half] uint8, on the owner's device

    @property
    def numbers(self) -> Tensor:
        return self.header.view(torch.int64)

    def half(self, number: int) -> Tensor:
        """Where message `number` lies."""
        size = len(self.data) // 2
        return self.data[number % 2 * size :][:size]


@dataclass(frozen=True)
class Letter:
    """A message on its way."""

    owner: str  # of the arena
    number: int
    body: bytes


class Outbox:
    """Where one actor writes what it sends. One thread uses it."""

    def __init__(self, device: torch.device | str, bound: Bound) -> None:
        owner = uuid.uuid4().hex
        half = -(-max(bound.size, 1) // ALIGNMENT) * ALIGNMENT
        header = shared_memory.allocate(f"{owner}-header", 16)
        if torch.device(device).type == "cpu":
            data = shared_memory.allocate(owner, 2 * half)
        else:
            data = torch.empty(2 * half, dtype=torch.uint8, device=device)
        self.arena = Arena(owner, header, data)
        self._bound, self._number = bound, 0

    def write(self, message: Any) -> Letter:
        """The message, complete when this returns. It can be read until the second `write` from here begins.

        Raises MessageTooLarge; the message before stays readable then.
        """
        arena, number = self.arena, self._number + 1
        half, used = arena.half(number), 0
        arena.numbers[number % 2] = WRITING

        def place(tensor: Tensor) -> Spot | None:
            nonlocal used
            if not self._belongs(tensor):
                return None
            at, used = used, used + -(-_bytes(tensor) // ALIGNMENT) * ALIGNMENT
            if used > len(half):
                raise MessageTooLarge(
                    f"a message of {used} bytes or more does not fit an outbox for {len(half)} ({self._bound.limit})"
                )
            spot = at, tuple(tensor.shape), tensor.dtype
            _view(half, spot).copy_(tensor)
            return spot

        body = wire.dumps(message, place)
        if half.is_cuda and used:
            torch.cuda.current_stream(half.device).synchronize()
        arena.numbers[number % 2] = self._number = number
        return Letter(arena.owner, number, body)

    def _belongs(self, tensor: Tensor) -> bool:
        """Whether the tensor lies on the arena's device and is better off in the arena."""
        if tensor.device != self.arena.data.device:
            return False
        return tensor.is_cuda or _bytes(tensor) >= INLINE


class Inbox:
    """A reader's view of another actor's outbox."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    @property
    def owner(self) -> str:
        return self._arena.owner

    def read(self, letter: Letter) -> Any:
        """The message; its tensors are views of the arena. Raises StaleMessage."""
        self.check(letter)
        half = self._arena.half(letter.number)
        return wire.loads(letter.body, lambda spot: _view(half, spot))

    def check(self, letter: Letter) -> None:
        """Whether the message is there. After its tensors were used: whether it was there all the time. Raises StaleMessage."""
        arena = self._arena
        if letter.owner != arena.owner:
            raise StaleMessage(f"message {letter.number} was written by {letter.owner}, not by {arena.owner}")
        held = int(arena.numbers[letter.number % 2])
        if held != letter.number:
            now = "another is being written" if held == WRITING else f"message {held} is"
            raise StaleMessage(f"message {letter.number} of outbox {arena.owner} is gone: {now} in its place")


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _view(half: Tensor, spot: Spot) -> Tensor:
    at, shape, dtype = spot
    return half[at : at + prod(shape) * dtype.itemsize].view(dtype).view(shape)
