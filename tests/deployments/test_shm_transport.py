"""Tensors through shared memory: alone, and as Ray Direct Transport between real actors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.deployments import shm_transport
from ddtree.deployments.shm_transport import ShmCommunicator, ShmTransport

DTYPES = [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.bool, torch.uint8]
shapes = st.lists(st.integers(0, 5), max_size=3)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), shapes, st.booleans()), max_size=5))
@settings(max_examples=60, deadline=None)
def test_what_is_read_is_what_was_written(wanted: list[tuple[torch.dtype, list[int], bool]]) -> None:
    transport = ShmTransport()
    tensors = [torch.randint(0, 2, [2, *shape]).to(dtype) for dtype, shape, _ in wanted]
    tensors = [t.transpose(0, -1) if swap else t for t, (*_, swap) in zip(tensors, wanted, strict=True)]
    meta = transport.extract_tensor_transport_metadata("object", tensors)
    read = transport.recv_multiple_tensors("object", meta, ShmCommunicator())
    transport.garbage_collect("object", meta, tensors)
    assert not Path(meta.path).exists()
    assert len(read) == len(tensors)
    for got, sent in zip(read, tensors, strict=True):
        assert got.dtype == sent.dtype and torch.equal(got, sent), "still readable after the sender let go"


def test_a_receiver_cannot_change_what_others_read() -> None:
    transport = ShmTransport()
    meta = transport.extract_tensor_transport_metadata("shared", [torch.arange(4)])
    first, second = (transport.recv_multiple_tensors("shared", meta, ShmCommunicator())[0] for _ in range(2))
    first += 100
    assert second.tolist() == [0, 1, 2, 3]
    transport.garbage_collect("shared", meta, [])


def test_files_of_a_killed_sender_are_removed_by_the_next() -> None:
    code = (
        "import os, signal, torch\n"
        "from ddtree.deployments.shm_transport import ShmTransport\n"
        "print(ShmTransport().extract_tensor_transport_metadata('left', [torch.zeros(9)]).path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = Path(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout.strip()
    )
    assert path.exists()
    ShmTransport()
    assert not path.parent.exists()
    assert (shm_transport._root() / str(os.getpid())).exists()
