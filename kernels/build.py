"""Compiles the CUDA kernels with CMake and nvcc, once per state of their sources. Knows no operation.

`python -m ddtree.kernels.build` does it ahead of time; otherwise it happens when CUDA tensors first arrive.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

LIBRARY = "libkdtree_kernels_c.so"
SOURCES = Path(__file__).parent / "csrc"
EVERY_ARCHITECTURE = "80-virtual;90a-real;100-real;120-real"

log = logging.getLogger(__name__)


class BuildError(RuntimeError):
    """The kernels cannot be compiled here; the message says why and what to do."""


def find_nvcc() -> Path | None:
    """nvcc of $CUDA_HOME, on the PATH, or at its usual place."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    found = [Path(home) / "bin" / "nvcc" for home in homes if home]
    if on_path := shutil.which("nvcc"):
        found.insert(0, Path(on_path))
    return next((path for path in found if path.is_file()), None)


def _tool(name: str) -> str | None:
    """A program of this Python's environment, which need not be on the PATH, or of the PATH."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def cache_dir() -> Path:
    """`$DDTREE_CACHE/kernels`, else the user's cache: the rule of the embedded models, which must not import torch."""
    root = os.environ.get("DDTREE_CACHE") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/ddtree"
    return Path(root).expanduser() / "kernels"


def built_library(architectures: str) -> Path:
    """Path of the library that `build` writes for the sources as they are now, whether or not it exists."""
    digest = hashlib.sha256(architectures.encode())
    for path in sorted(p for p in SOURCES.rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(SOURCES)}\0".encode() + path.read_bytes())
    return cache_dir() / digest.hexdigest()[:16] / LIBRARY


def build(architectures: str = EVERY_ARCHITECTURE) -> Path:
    """Returns the library for CUDA `architectures` (CMake's names), compiled now or found in the cache.

    Several processes may call it at once: each compiles on its own, and the first to finish is kept.

    Raises:
        BuildError: no nvcc or CMake, or the compiler failed.
    """
    library = built_library(architectures)
    if library.is_file():
        return library
    nvcc, cmake, ninja = find_nvcc(), _tool("cmake"), _tool("ninja")
    if nvcc is None:
        raise BuildError("nvcc was not found; install the CUDA toolkit (12.8 or newer) or set CUDA_HOME.")
    if cmake is None:
        raise BuildError("cmake was not found; install it: pip install cmake ninja.")
    folder = library.parent / f"build-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log.warning(
        "Compiling the CUDA kernels for %s into %s: once, about a minute an architecture.", architectures, folder
    )
    generator = ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}") if ninja else ()
    configure = [
        *(cmake, "-S", str(SOURCES), "-B", str(folder), *generator),
        *(f"-DCMAKE_CUDA_COMPILER={nvcc}", f"-DKDTREE_ARCHITECTURES={architectures}"),
    ]
    _run(configure)
    _run([cmake, "--build", str(folder), "--parallel", str(min(8, os.cpu_count() or 1))])
    os.replace(folder / LIBRARY, library)
    shutil.rmtree(folder, ignore_errors=True)
    return library


def _run(command: list[str]) -> None:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        raise BuildError(f"Compiling the CUDA kernels failed: {' '.join(command)}\n{result.stdout[-4000:]}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        print(build(*sys.argv[1:2]))
    except BuildError as error:
        sys.exit(str(error))
