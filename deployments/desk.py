"""A device actor's end of the mailbox transport: it reads the letters of a call, computes, and answers with a letter.

Knows mailboxes and the channel; not what is computed, and no Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddtree.deployments import shared_memory
from ddtree.deployments.channel import Server
from ddtree.deployments.device_thread import DeviceThread
from ddtree.deployments.mailbox import Arena, Inbox, Letter, Outbox, StaleMessage

ANNOUNCE = "announce"  # the notice that a message is to come


class Desk:
    """Answers calls of the given methods, all of them on the device thread."""

    def __init__(
        self,
        thread: DeviceThread,
        outbox: Outbox,
        methods: Mapping[str, Callable[..., Any]],
        prepare: Callable[[Any], None] = lambda _: None,
    ) -> None:
        """A method takes messages or plain values, and returns a message that fits the outbox. `prepare` is given a message
        that is announced, before a method gets it."""
        self._outbox, self._methods, self._prepare = outbox, methods, prepare
        self._inboxes: dict[str, Inbox] = {}  # by role: who replaces a dead one replaces its inbox
        self.address: Path = shared_memory.own_folder() / f"{outbox.arena.owner}-calls"
        thread.run(Server, self.address, self._handle, thread)

    @property
    def arena(self) -> Arena:
        """For actors that are to read what is written here."""
        return self._outbox.arena

    def introduce(self, role: str, arena: Arena) -> None:
        """From now on letters of this role, "router" or "verifier", are read from this arena."""
        self._inboxes = {**self._inboxes, role: Inbox(arena)}  # the device thread may be looking for one

    def _handle(self, method: str, *args: Any) -> Letter | None:
        if method == ANNOUNCE:
            self._prepare(self._inbox(*args).expect(*args))
            return None
        answer = self._outbox.write(self._methods[method](*map(self._open, args)))
        for arg in args:
            if isinstance(arg, Letter):
                self._inbox(arg).check(arg)  # all that was read was still there
        return answer

    def _open(self, arg: Any) -> Any:
        return self._inbox(arg).read(arg) if isinstance(arg, Letter) else arg

    def _inbox(self, letter: Letter) -> Inbox:
        for inbox in self._inboxes.values():
            if inbox.owner == letter.owner:
                return inbox
        raise StaleMessage(f"a message from {letter.owner}, whose outbox is not known here")
