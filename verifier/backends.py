"""What can run a target, by name. Imports a backend only when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict, Unpack

if TYPE_CHECKING:  # torch stays out of whoever only checks a name
    from ddtree.verifier.target import Target


class TargetOptions(TypedDict):
    """How to load a target; the same for every backend. See `hf.HFTarget`."""

    dtype: str
    device: str
    page_size: int
    pages: int
    feature_layers: tuple[int, ...]
    threads: int | None


Loader = Callable[[str, TargetOptions], "Target"]


def _hf(model_dir: str, options: TargetOptions) -> Target:
    from ddtree.verifier.hf import HFTarget

    return HFTarget(model_dir, **options)


BACKENDS: dict[str, Loader] = {"hf": _hf}


def check_backend(name: str) -> None:
    """Raise ValueError, naming the valid ones, where no backend has this name."""
    valid = ", ".join(BACKENDS)
    if name == "vllm":
        raise ValueError(f"backend 'vllm' comes with the `vllm` extra and is not built in yet; valid are: {valid}")
    if name not in BACKENDS:
        raise ValueError(f"unknown verifier backend '{name}'; valid are: {valid}")


def load_target(backend: str, model_dir: str, **options: Unpack[TargetOptions]) -> Target:
    """Load the model at `model_dir` with the named backend. Raises ValueError for an unknown name."""
    check_backend(backend)
    return BACKENDS[backend](model_dir, options)
