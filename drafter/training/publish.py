"""The files of a finished run: both checkpoint forms and the model card. Knows no training loop."""

from __future__ import annotations

import datetime
import platform
from pathlib import Path
from typing import Any

import torch

from ddtree.drafter.checkpoint import save_int8, save_published
from ddtree.drafter.dflash import DFlashModel
from ddtree.drafter.path_head import PathHead
from ddtree.drafter.training.card import Facts, card
from ddtree.drafter.training.options import TrainOptions

PUBLISHED, INT8 = "checkpoint", "checkpoint-int8"


def save_checkpoints(model: DFlashModel, out_dir: Path, head: PathHead | None = None) -> None:
    """`checkpoint/` in bf16, the published form, and `checkpoint-int8/`, half its size; the head, if there is one, in both."""
    if head:
        save_head(head, out_dir)
    save_published(model, out_dir / PUBLISHED)
    save_int8(model, out_dir / INT8)


def save_head(head: PathHead, out_dir: Path) -> None:
    """Into both forms."""
    head.save(out_dir / PUBLISHED)
    head.save(out_dir / INT8, dtype=torch.int8)


def facts(device: torch.device, count: int, data: str) -> Facts:
    """Of a training that ends now on `count` devices such as `device`."""
    name = f"{count} × {torch.cuda.get_device_name(device)}" if device.type == "cuda" else f"CPU ({platform.machine()})"
    return Facts(name, torch.__version__, datetime.datetime.now(datetime.UTC).date().isoformat(), data)


def save_card(
    options: TrainOptions, target: str, known: Facts, metrics: list[dict[str, Any]], evaluation: dict[str, Any]
) -> None:
    """`README.md` in the run's folder and in both checkpoint folders."""
    out = options.out_dir
    forms = {"bf16": PUBLISHED, "int8": INT8}
    files = {form: (out / folder).rglob("*.safetensors") for form, folder in forms.items()}
    megabytes = {form: sum(path.stat().st_size for path in found) / 1e6 for form, found in files.items()}
    text = card(options, target, known, metrics[-1] if metrics else {}, evaluation, megabytes)
    for folder in (out, out / PUBLISHED, out / INT8):
        (folder / "README.md").write_text(text)
