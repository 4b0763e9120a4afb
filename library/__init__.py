"""Draft trees as a library: `ddtree.generate` and `ddtree.load`. Imports nothing before it is asked for: no torch, no Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddtree.deployments.library import Answer, Generation, Loaded, generate, load

__all__ = ["Answer", "Generation", "Loaded", "generate", "load"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ddtree' has no attribute {name!r}; it has {', '.join(__all__)}")
    from ddtree.deployments import library

    return getattr(library, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
