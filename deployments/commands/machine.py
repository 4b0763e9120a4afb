"""What this machine is and which versions run on it. Loads no torch and asks no network."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ddtree.deployments.cores import usable_cores

BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")


@dataclass(frozen=True)
class Machine:
    """Facts of the hardware."""

    cpu: str
    cores: int  # that this process may use
    bf16: tuple[str, ...]  # instruction sets of the CPU with bfloat16 arithmetic
    memory_gib: float
    gpus: tuple[str, ...]

    @classmethod
    def read(cls) -> Machine:
        cpuinfo = _cpuinfo()
        flags = (cpuinfo.get("flags") or cpuinfo.get("Features") or "").split()
        return cls(
            cpu=cpuinfo.get("model name") or platform.processor() or platform.machine(),
            cores=usable_cores(),
            bf16=tuple(flag for flag in BF16_FLAGS if flag in flags),
            memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            gpus=_gpus(),
        )


def installed(package: str) -> str | None:
    """Return the version of an installed distribution, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpuinfo() -> dict[str, str]:
    """Return the first processor of /proc/cpuinfo; empty where there is no such file."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _gpus() -> tuple[str, ...]:
    """Return the names and memory of the NVIDIA GPUs, asked of the driver's own tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in done.stdout.splitlines() if line.strip())
