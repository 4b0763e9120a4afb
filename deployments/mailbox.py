"""Messages whose tensors stay in their sender's memory: the sender writes them into an arena that its readers have mapped.

An arena is two halves, written in turn, so a message can be read until its sender has written two more. What travels is a
letter: a few bytes, the message with places in the arena instead of tensors. Small CPU tensors travel inside. A header in host
memory says which message each half holds; reading one that is gone raises an error instead of giving other numbers. A message may
be announced before its tensors are written, to who can begin with the rest.
Knows memory, not how arenas and letters reach a reader.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from ddtree.deployments import shared_memory, wire

ALIGNMENT = 256  # bytes; what the widest loads of a kernel want
INLINE = 4096  # bytes; a CPU tensor below this travels in the letter
WRITING = 0  # in the header: the half is being written; messages count from 1
VIEWS = 512  # of an arena that a process keeps; most shapes of a message are those of one before


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


@dataclass(frozen=True)
class Letter:
    """A message on its way."""

    owner: str  # of the arena
    number: int
    body: bytes | None  # None: of the message that was announced


class _Mapped:
    """An arena as this process sees it. A torch call takes microseconds, so what is made of it is made once."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.numbers = arena.header.numpy().data.cast("q")  # of the message in each half
        self.size = len(arena.data) // 2  # of a half
        self._views: dict[tuple[int, wire.Shape, torch.dtype], Tensor] = {}

    def view(self, number: int, at: int, shape: wire.Shape, dtype: torch.dtype) -> Tensor:
        """A tensor of message `number`, `at` bytes from the start of its half."""
        begin = number % 2 * self.size + at
        key = begin, shape, dtype
        if (view := self._views.get(key)) is None:
            if len(self._views) == VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # it may be used with and without later on
                view = self.arena.data[begin : begin + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            self._views[key] = view
        return view


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
        self._mapped, self._bound = _Mapped(self.arena), bound
        self._number = 1  # of the next message
        self._used = self._reserved = 0  # bytes of its half
        self._announced: Any = None  # the message itself
        self._device, self._on_host, self._start = data.device, data.is_cpu, data.data_ptr()

    def empty(self, shape: wire.Shape, dtype: torch.dtype) -> Tensor:
        """Memory in the half of the next message, on the arena's device: a tensor that lies there when the message is written
        need not be copied. From the first of them on, the message that was in that half is gone.

        Raises MessageTooLarge, and like `discard` forgets what was reserved.
        """
        try:
            view = self._take(tuple(shape), dtype)
        except MessageTooLarge:
            self.discard()
            raise
        self._reserved = self._used
        return view

    def discard(self) -> None:
        """Forget what was reserved for a message that will not be written."""
        self._used = self._reserved = 0
        self._announced = None

    def announce(self, message: Any) -> Letter:
        """The message, all of whose tensors on the arena's device lie in reserved memory, and are to be written to yet. `write`
        of the same object says that they were; until then nothing else may be reserved."""
        reserved = self._used
        body = wire.dumps(message, self._place)
        if self._used != reserved:
            self.discard()
            raise ValueError("a message that is announced has no tensors but reserved ones on the arena's device")
        self._announced = message
        return Letter(self.arena.owner, self._number, body)

    def write(self, message: Any) -> Letter:
        """The message, complete when this returns. It can be read until the second `write` from here begins.

        Pinned host tensors of it may still be on their way from the device, on the current stream.
        Raises MessageTooLarge; the message before stays readable then.
        """
        number = self._number
        self._mapped.numbers[number % 2] = WRITING
        try:
            if message is not None and message is self._announced:
                self._wait()
                body = None
            else:
                body = wire.dumps(message, self._place, self._wait)
        finally:
            self.discard()
        self._mapped.numbers[number % 2] = number
        self._number += 1
        return Letter(self.arena.owner, number, body)

    def _place(self, tensor: Tensor) -> int | None:
        """Bytes from the start of the half where the tensor is, or is being copied to; None where it is to travel."""
        if tensor.is_cpu != self._on_host or tensor.device != self._device:
            return None
        if self._reserved and (at := self._lies_at(tensor)) is not None:
            return at
        if self._on_host and tensor.nbytes < INLINE:
            return None
        at = self._used
        self._take(tuple(tensor.shape), tensor.dtype).copy_(tensor)
        return at

    def _lies_at(self, tensor: Tensor) -> int | None:
        """Where, if in what was reserved for this message."""
        at = tensor.data_ptr() - self._start - self._number % 2 * self._mapped.size
        return at if 0 <= at < self._reserved and tensor.is_contiguous() else None

    def _take(self, shape: wire.Shape, dtype: torch.dtype) -> Tensor:
        """The next part of the half. Raises MessageTooLarge."""
        at = self._used
        self._used += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if self._used > self._mapped.size:
            raise MessageTooLarge(
                f"a message of {self._used} bytes or more does not fit an outbox for {self._mapped.size} "
                f"({self._bound.limit})"
            )
        self._mapped.numbers[self._number % 2] = WRITING
        return self._mapped.view(self._number, at, shape, dtype)

    def _wait(self) -> None:
        """For the copies of this message, into the arena and to the host."""
        if not self._on_host:
            torch.cuda.current_stream(self._device).synchronize()


class Inbox:
    """A reader's view of another actor's outbox."""

    def __init__(self, arena: Arena) -> None:
        self._mapped = _Mapped(arena)
        self._announced: tuple[int, Any] = WRITING, None  # its number, and the message
        self._opened: dict[tuple[int, bytes], Any] = {}  # by half and body: most messages are where one before was

    @property
    def owner(self) -> str:
        return self._mapped.arena.owner

    def read(self, letter: Letter) -> Any:
        """The message; its tensors are views of the arena. Raises StaleMessage."""
        self.check(letter)
        if letter.body is not None:
            return self._open(letter.number, letter.body)
        number, message = self._announced
        if number != letter.number:
            raise StaleMessage(f"message {letter.number} of outbox {self.owner} was not announced here")
        return message

    def expect(self, letter: Letter) -> Any:
        """A message that is announced, with views of what will be its tensors."""
        assert letter.body is not None
        self._announced = letter.number, self._open(letter.number, letter.body)
        return self._announced[1]

    def _open(self, number: int, body: bytes) -> Any:
        find = partial(self._mapped.view, number)
        if wire.has_numbers(body):
            return wire.loads(body, find)
        if (message := self._opened.get((number % 2, body))) is None:
            if len(self._opened) == VIEWS:
                self._opened.clear()
            message = self._opened[number % 2, body] = wire.loads(body, find)
        return message

    def check(self, letter: Letter) -> None:
        """Whether the message is there. After its tensors were used: whether it was there all the time. Raises StaleMessage."""
        owner, number = self.owner, letter.number
        if letter.owner != owner:
            raise StaleMessage(f"message {number} was written by {letter.owner}, not by {owner}")
        held = self._mapped.numbers[number % 2]
        if held != number:
            now = "another is being written" if held == WRITING else f"message {held} is"
            raise StaleMessage(f"message {number} of outbox {owner} is gone: {now} in its place")
