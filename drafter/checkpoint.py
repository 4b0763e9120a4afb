"""DFlash checkpoints on disk: the published form, and the same with int8 rows. Knows no target and no caches.

int8 rows (int8_rows.py): every matrix is int8 with a scale per row, vectors are fp32, and config.json says
`"ddtree_quantization": {"format": "int8_rows"}`. Weights are dequantised at load.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from ddtree.drafter.config import QUANTIZATION_KEY, DrafterInfo
from ddtree.drafter.dflash import DFlashModel
from ddtree.drafter.int8_rows import dequantise, quantise, some
from ddtree.drafter.tensors import read_tensors


def load_published(
    checkpoint_dir: str | Path, *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> DFlashModel:
    """The drafter of a checkpoint directory (config.json + *.safetensors, sharded or not, plain or int8 rows).

    Raises:
        ValueError: not a DFlash checkpoint, another quantisation, or tensors that are missing, unknown or misshapen.
    """
    info = DrafterInfo.read(checkpoint_dir)
    if info.random_weights:
        return _make(info, dtype, torch.device(device))
    stored = read_tensors(info.checkpoint_dir)
    if info.quantization == "int8_rows":
        try:
            stored = dequantise(stored)
        except ValueError as error:
            raise ValueError(f"drafter {info.checkpoint_dir}: {error}") from error
    with torch.device("meta"):  # no time or memory for an initialisation that is overwritten
        model = DFlashModel(info)
    _check(stored, model, info.checkpoint_dir)
    model.load_state_dict({name: tensor.to(device, dtype) for name, tensor in stored.items()}, assign=True)
    return model.eval()


def _make(info: DrafterInfo, dtype: torch.dtype, device: torch.device) -> DFlashModel:
    """Random weights, on the device at once."""
    torch.manual_seed(0)
    with device:
        return DFlashModel(info).to(dtype).eval()


def save_published(model: DFlashModel, directory: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes config.json and model.safetensors with the published names in `dtype`."""
    _write(directory, model, {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}, {})


def save_int8(model: DFlashModel, directory: str | Path) -> None:
    """Writes the int8-rows form (see the file header)."""
    _write(directory, model, quantise(model.state_dict()), {QUANTIZATION_KEY: {"format": "int8_rows"}})


def _check(stored: dict[str, Tensor], model: DFlashModel, directory: Path) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    problems = {
        "lacks": [name for name in expected if name not in stored],
        "has unknown": [name for name in stored if name not in expected],
        "has misshapen": [
            f"{name} {tuple(stored[name].shape)} instead of {shape}"
            for name, shape in expected.items()
            if name in stored and tuple(stored[name].shape) != shape
        ],
        "has unscaled integer": [name for name, tensor in stored.items() if not tensor.is_floating_point()],
    }
    found = [f"{what} tensors {some(names)}" for what, names in problems.items() if names]
    if found:
        raise ValueError(f"drafter {directory} does not match its config.json: it {' and '.join(found)}")


def _write(directory: str | Path, model: DFlashModel, tensors: dict[str, Tensor], extra: dict[str, object]) -> None:
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # save_file would make it readable by its owner alone, whatever the umask
    (directory / "model.safetensors").write_bytes(save(contiguous, {"format": "pt"}))
    (directory / "config.json").write_text(json.dumps(model.config.to_dict() | extra, indent=2) + "\n")
