"""What can run a target, by name. Imports a backend only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict, Unpack

from ddtree.verifier import vllm_versions
from ddtree.verifier.model_dir import MODEL_TYPES, TargetInfo

if TYPE_CHECKING:  # torch stays out of whoever only checks a name
    from ddtree.verifier.graphs import StepSizes
    from ddtree.verifier.memory import MemoryShare
    from ddtree.verifier.target import Target


class TargetOptions(TypedDict):
    """How to load a target; the same for every backend. See `hf.HFTarget`."""

    dtype: str
    device: str
    page_size: int
    pages: int | MemoryShare
    feature_layers: tuple[int, ...]
    threads: int | None
    batch_invariant: NotRequired[bool]
    graphs: NotRequired[StepSizes | None]


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that hold one target together, each a part of every layer."""

    rank: int = 0
    world_size: int = 1
    init_address: str | None = None  # where they meet: "tcp://HOST:PORT" of rank 0; one alone needs none


@dataclass(frozen=True)
class Backend:
    """One way to run a target."""

    load: Callable[[str, TargetOptions, Ranks], Target]
    check: Callable[[], None]  # raises ValueError, saying what to install, where it cannot run
    model_types: tuple[str, ...]
    quantized: bool  # whether it serves quantised weights as they are


def _hf(model_dir: str, options: TargetOptions, ranks: Ranks) -> Target:
    from ddtree.verifier.hf import HFTarget

    if ranks.world_size != 1:
        raise ValueError(f"backend 'hf' runs a target in one process, not in {ranks.world_size}; use backend 'vllm'")
    return HFTarget(model_dir, **options)


def _vllm(model_dir: str, options: TargetOptions, ranks: Ranks) -> Target:
    from ddtree.verifier.vllm_target import VLLMTarget

    return VLLMTarget(model_dir, **options, **vars(ranks))


BACKENDS: dict[str, Backend] = {
    "hf": Backend(_hf, lambda: None, ("llama", "qwen2", "qwen3", "qwen3_moe"), quantized=False),
    "vllm": Backend(_vllm, vllm_versions.check, MODEL_TYPES, quantized=True),
}


def check_backend(name: str, target: TargetInfo | None = None) -> None:
    """Raise ValueError where no backend has this name (naming the valid ones), it lacks what it needs, or it cannot
    serve this target (naming the backends that can)."""
    if name not in BACKENDS:
        raise ValueError(f"unknown verifier backend '{name}'; valid are: {', '.join(BACKENDS)}")
    if target is not None and not _serves(BACKENDS[name], target):
        weights = f"weights quantised by {target.quantization}" if target.quantization else "models"
        can = " or ".join(f"'{other}'" for other, backend in BACKENDS.items() if _serves(backend, target))
        raise ValueError(f"backend '{name}' cannot serve '{target.model_type}' {weights}; use backend {can}")
    BACKENDS[name].check()


def _serves(backend: Backend, target: TargetInfo) -> bool:
    return target.model_type in backend.model_types and (backend.quantized or target.quantization is None)


def load_target(
    backend: str, model_dir: str, *, ranks: Ranks | None = None, **options: Unpack[TargetOptions]
) -> Target:
    """Load the model at `model_dir`, or this rank's part of it, with the named backend.

    Raises ValueError for an unknown name, and where the backend cannot run here or cannot serve this model.
    """
    check_backend(backend)
    check_backend(backend, TargetInfo.read(Path(model_dir)))
    return BACKENDS[backend].load(model_dir, options, ranks or Ranks())
