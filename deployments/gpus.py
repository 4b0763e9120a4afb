"""What the GPUs can do that a deployment may be planned for. Facts only; asks no machine.

The H200 was measured (benchmarks/README.md: a copying kernel, torch's 8192³ product; design notes: a copy between two).
The others are their datasheets times the part of its datasheet that the H200 reached, until somebody measures them.
"""

from __future__ import annotations

from dataclasses import dataclass

COPY = 4.26e12 / 4.8e12  # of the memory bandwidth in the datasheet
MATMUL = 787e12 / 989e12  # of the dense bfloat16 rate in the datasheet
LINK = 392e9 / 450e9  # of NVLink, one direction


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, SXM form."""

    name: str
    memory: int  # bytes, as CUDA reports them
    bandwidth: float  # bytes a second, of memory
    matmul: float  # dense bfloat16 FLOP a second
    link: float  # bytes a second to another GPU of the host, one direction
    measured: bool


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", int(79.15 * 2**30), 3.35e12 * COPY, 989e12 * MATMUL, 450e9 * LINK, measured=False),
        Gpu("H200", int(139.80 * 2**30), 4.26e12, 787e12, 392e9, measured=True),
        Gpu("B200", int(178.35 * 2**30), 8.0e12 * COPY, 2250e12 * MATMUL, 900e9 * LINK, measured=False),
    )
}
