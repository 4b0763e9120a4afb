"""Models with random weights, made from their sizes alone and kept in the cache: `weights: random` in a configuration.

A model of up to FILES_BELOW, not quantised, gets a weights file like any checkpoint, so that every backend, and the drafter that
borrows the target's ends, holds the same numbers. A larger one is for measuring speed, where writing and reading gigabytes
would cost more than the measurement: its directory has no weights, and whoever loads it makes its own, on its device.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddtree.deployments.shapes import facts
from ddtree.deployments.target_shape import TargetShape
from ddtree.verifier.embedded import cache_dir

FILES_BELOW = 1 << 30  # bytes, in float32
VERSION = 1  # raise when what is made from the same sizes changes
REMEDY = "random weights are made from the sizes in a config.json: give the directory of one"


def target(model: str) -> Path:
    """The Hugging Face directory of a random target, tokenizer included. Raises ValueError where none can be made."""

    def write(content: Mapping[str, Any], folder: Path) -> None:
        from ddtree.verifier import random_target

        shape = TargetShape.from_config(content, "its config.json")
        small = shape.quantisation is None and 4 * shape.parameters <= FILES_BELOW
        random_target.write(content, folder, weights=small)

    return _made("target", model, write)


def drafter(checkpoint: str) -> Path:
    """The directory of a random drafter in published form. Raises ValueError where none can be made."""

    def write(content: Mapping[str, Any], folder: Path) -> None:
        from ddtree.drafter import random_drafter

        random_drafter.write(content, folder, files_below=FILES_BELOW)

    return _made("drafter", checkpoint, write)


def _made(what: str, name: str, write: Callable[[Mapping[str, Any], Path], None]) -> Path:
    """The directory for a model's sizes, written unless the cache has it. It appears whole or not at all."""
    content, source = facts(name, what, REMEDY)
    key = hashlib.sha256(json.dumps([VERSION, what, content], sort_keys=True).encode()).hexdigest()[:16]
    final = cache_dir() / "random" / key / Path(name).name
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=".partial-") as partial:
        made = Path(partial) / final.name
        made.mkdir()
        try:
            write(content, made)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
        try:
            made.rename(final)
        except OSError:
            if not final.is_dir():  # else another process was faster, and wrote the same
                raise
    return final
