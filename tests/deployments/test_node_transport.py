"""Tensors through memory of the node, as Ray asks a transport for them: those of objects are copies, arenas are themselves."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree.deployments import shared_memory
from ddtree.deployments.node_transport import NodeCommunicator, NodeTransport

DTYPES = [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.bool, torch.uint8]
shapes = st.lists(st.integers(0, 5), max_size=3)


def passed(transport: NodeTransport, name: str, tensors: list[Tensor]) -> list[Tensor]:
    """What a receiver gets, after the sender has let go."""
    meta = transport.extract_tensor_transport_metadata(name, tensors)
    read = transport.recv_multiple_tensors(name, meta, NodeCommunicator())
    transport.garbage_collect(name, meta, tensors)
    assert meta.file is None or not meta.file.exists()
    return read


@given(st.lists(st.tuples(st.sampled_from(DTYPES), shapes, st.booleans()), max_size=5))
@settings(max_examples=60, deadline=None)
def test_what_is_read_is_what_was_written(wanted: list[tuple[torch.dtype, list[int], bool]]) -> None:
    tensors = [torch.randint(0, 2, [2, *shape]).to(dtype) for dtype, shape, _ in wanted]
    tensors = [t.transpose(0, -1) if swap else t for t, (*_, swap) in zip(tensors, wanted, strict=True)]
    read = passed(NodeTransport(), "object", tensors)
    assert len(read) == len(tensors)
    for got, sent in zip(read, tensors, strict=True):
        assert got.dtype == sent.dtype and torch.equal(got, sent), "still readable after the sender let go"


def test_a_receiver_cannot_change_what_others_read() -> None:
    transport = NodeTransport()
    meta = transport.extract_tensor_transport_metadata("shared", [torch.arange(4)])
    first, second = (transport.recv_multiple_tensors("shared", meta, NodeCommunicator())[0] for _ in range(2))
    first += 100
    assert second.tolist() == [0, 1, 2, 3]
    transport.garbage_collect("shared", meta, [])


def test_an_arena_is_passed_by_reference_beside_others() -> None:
    arena = shared_memory.allocate("arena", 300)
    (read, other) = passed(NodeTransport(), "mixed", [arena, torch.arange(3)])
    arena[7] = 5
    assert read[7] == 5 and len(read) == 300, "later writes of the owner are seen"
    read[8] = 6
    assert arena[8] == 6
    assert other.tolist() == [0, 1, 2]


def test_files_of_a_killed_sender_are_removed_by_the_next() -> None:
    code = (
        "import os, signal, torch\n"
        "from ddtree.deployments.node_transport import NodeTransport\n"
        "print(NodeTransport().extract_tensor_transport_metadata('left', [torch.zeros(9)]).file, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = Path(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120).stdout.strip()
    )
    assert path.exists()
    again = "from ddtree.deployments import shared_memory; shared_memory.own_folder()"
    subprocess.run([sys.executable, "-c", again], check=True, timeout=120)
    assert not path.parent.exists()
    assert shared_memory.own_folder() == shared_memory.root() / str(os.getpid())


# Run in another process: maps a CUDA tensor through the metadata on stdin, changes it, and prints its sum.
READER = """
import pickle, sys, torch
from ddtree.deployments.node_transport import NodeCommunicator, NodeTransport
torch.cuda.set_device(int(sys.argv[1]))
(read,) = NodeTransport().recv_multiple_tensors("x", pickle.load(sys.stdin.buffer), NodeCommunicator())
total = float(read.sum())
read[0] = 42
torch.cuda.synchronize()
print(read.device.index, total)
"""


@pytest.mark.parametrize(("gpu", "seen"), [(0, "0,1"), (1, "0,1"), (1, "1")])  # Ray shows an actor its own GPU alone
def test_a_cuda_tensor_is_mapped_by_another_process(gpu: int, seen: str) -> None:
    if torch.cuda.device_count() <= gpu:
        pytest.skip(f"needs {gpu + 1} CUDA devices; here are {torch.cuda.device_count()}")
    tensor = torch.arange(1000, device="cuda:0", dtype=torch.float32)
    torch.cuda.synchronize()
    meta = NodeTransport().extract_tensor_transport_metadata("x", [tensor])
    index = str(seen.split(",").index(str(gpu)))
    command, environment = [sys.executable, "-c", READER, index], {**os.environ, "CUDA_VISIBLE_DEVICES": seen}
    answer = subprocess.run(command, input=pickle.dumps(meta), capture_output=True, timeout=120, env=environment)
    assert answer.returncode == 0, answer.stderr.decode()
    assert answer.stdout.split() == [index.encode(), b"499500.0"]
    assert tensor[0] == 42, "the owner sees what the other wrote"
