"""The CUDA sources on the CPU: compiled with g++ against emulator/, called through `ddtree.kernels.cuda` with CPU tensors."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from ddtree.kernels import build, cuda, dispatch
from ddtree.kernels.native import Library

EMULATOR = Path(__file__).parent / "emulator"
FLAGS = (
    *("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-DKDTREE_EMULATED"),
    *("-ffp-contract=off", "-fno-strict-aliasing"),  # sums round as written; memory is read as any type
    *("-Wno-unknown-pragmas", "-Wno-attributes", "-U_FORTIFY_SOURCE"),  # which would forbid jumps between fibers
    *(f"-I{EMULATOR}", f"-I{EMULATOR}/include", f"-I{build.SOURCES}"),
)


def compiler() -> str | None:
    """g++ where it can compile the emulator: 12 or newer (C++20, _Float16), on Linux."""
    found = shutil.which("g++") if sys.platform == "linux" else None
    version = subprocess.run([found, "-dumpversion"], capture_output=True, text=True).stdout if found else "0"
    return found if int(version.split(".")[0]) >= 12 else None


def built_library() -> Path:
    """Compiled now or found in the cache of the real one, by the state of all sources."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(p for folder in (build.SOURCES, EMULATOR) for p in folder.rglob("*") if p.is_file()):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    library = build.cache_dir() / f"emulated-{digest.hexdigest()[:16]}" / build.LIBRARY
    library.parent.mkdir(parents=True, exist_ok=True)
    with (library.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of test processes that run at once, one compiles
        if not library.is_file():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as name:
        folder = Path(name)
        sources = [EMULATOR / "scheduler.cpp", *(p for p in build.SOURCES.glob("*.cu") if "hopper" not in p.name)]

        def compiled(source: Path) -> Path:
            subprocess.run(["g++", *FLAGS, "-x", "c++", "-c", source, "-o", folder / f"{source.stem}.o"], check=True)
            return folder / f"{source.stem}.o"

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, sources))
        subprocess.run(["g++", "-shared", *objects, "-o", folder / build.LIBRARY], check=True)
        os.replace(folder / build.LIBRARY, library)


@cache
def library() -> Library:
    return Library(built_library())


def aligned_bytes(count: int, device: torch.device) -> Tensor:
    held = torch.empty(count + 256, dtype=torch.uint8)
    return held[-held.data_ptr() % 256 :][:count]


@contextmanager
def emulated() -> Iterator[None]:
    """Every operation on CPU tensors runs the CUDA sources."""
    with (
        mock.patch.object(dispatch, "reference", cuda),
        mock.patch.multiple(cuda, library=library, _bytes=aligned_bytes, _stream=lambda tensor: None),
        mock.patch.object(torch.cuda, "device", lambda device: nullcontext()),
    ):
        yield
