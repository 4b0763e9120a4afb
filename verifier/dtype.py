"""Which number format suits a device. Knows no model."""

from __future__ import annotations

from pathlib import Path

import torch

_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86 flags, then the one of 64-bit Arm


def choose_dtype(device: torch.device | str) -> torch.dtype:
    """bfloat16 on CUDA and on CPUs that compute in it, where it is faster; float32 elsewhere."""
    if torch.device(device).type == "cuda":
        return torch.bfloat16
    return torch.bfloat16 if _cpu_flags() & _BF16_FLAGS else torch.float32


def resolve_dtype(name: str | torch.dtype, device: torch.device | str) -> torch.dtype:
    """A torch dtype of its name, or what suits the device for "auto". Raises ValueError for any other name."""
    valid = ("float32", "bfloat16", "float16")
    if isinstance(name, torch.dtype):
        return name
    if name == "auto":
        return choose_dtype(device)
    if name not in valid:
        raise ValueError(f"unknown dtype '{name}'; valid are auto, {', '.join(valid)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _cpu_flags() -> set[str]:
    """Of the first processor in /proc/cpuinfo; empty where the system has no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return set(value.split())
    return set()
