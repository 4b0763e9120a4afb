"""How tensors pass between device actors: Ray Direct Transport, `objects` form.

What an actor returns stays where it is and the receiver reads it: through shared memory between processes of a CPU node
(shm_transport.py), through CUDA IPC between actors that share a GPU. Both are one-sided, so that one end may die without the
other (two-sided transports take the peer down with them). Knows no model and no request.
"""

from __future__ import annotations

from typing import Any

import ray

from ddtree.deployments import shm_transport, wire


def install(device: str) -> str:
    """Make the transport of `device` ("cpu", "cuda") usable in this process; returns its name for `tensor_transport=`.

    Call it in the constructor of every actor that sends or receives: actors are pickled by value, so nothing that runs at
    import time can be relied on.
    """
    if device == "cuda":
        return "CUDA_IPC"
    return shm_transport.register()


def share(message: Any, transport: str) -> Any:
    """An argument for a device actor; it calls `received` on it. On a CPU the message itself: a step's few kilobytes travel
    faster inside the call than as a second object. On a GPU an RDT object, so that no tensor goes to the host."""
    return wire.dumps(message) if transport == shm_transport.NAME else ray.put(message, _tensor_transport=transport)


def received(argument: Any) -> Any:
    """What was shared."""
    return wire.loads(argument) if isinstance(argument, bytes) else argument
