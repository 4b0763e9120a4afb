"""Named tensors of a model directory's *.safetensors files, single or sharded. Knows no model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"


def tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name → file, from the index where there is one, else from the files at the directory's top level.

    Raises:
        ValueError: no safetensors file there, or the index names one that is missing.
    """
    index = directory / INDEX
    if index.is_file():
        found = {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        missing = sorted({path.name for path in found.values() if not path.is_file()})
        if missing:
            raise ValueError(f"{directory} lacks {', '.join(missing)}, which {INDEX} names: copy the whole directory")
        return found
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    if not found:
        raise ValueError(f"no *.safetensors in {directory}: give the directory that holds the model's weights")
    return found


def read_tensors(directory: Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """Reads the tensors whose name is wanted, to CPU memory, in their stored dtype; the others are not touched."""
    names_of: dict[Path, list[str]] = {}
    for name, path in tensor_files(directory).items():
        if wanted(name):
            names_of.setdefault(path, []).append(name)
    tensors: dict[str, Tensor] = {}
    for path, names in names_of.items():
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in names}
    return tensors
