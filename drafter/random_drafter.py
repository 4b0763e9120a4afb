"""Writes the directory of a drafter with random weights. Its drafts are worth nothing, and cost what any drafter's do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ddtree.drafter.checkpoint import save_published
from ddtree.drafter.config import RANDOM_KEY, DrafterConfig
from ddtree.drafter.dflash import DFlashModel

SEED = 0


def write(sizes: Mapping[str, Any], folder: Path, *, files_below: int) -> None:
    """Write a checkpoint in published form: config.json and, up to so many bytes, the weights in float32.

    sizes: what a config.json says. The weights depend on them alone. A larger model gets none: its config says so
    (`RANDOM_KEY`), and `load_published` makes them. Raises ValueError where the sizes are no drafter's.
    """
    config = DrafterConfig.from_dict(sizes)
    with torch.device("meta"):
        model = DFlashModel(config)
    if 4 * sum(parameter.numel() for parameter in model.parameters()) > files_below:
        (folder / "config.json").write_text(json.dumps(config.to_dict() | {RANDOM_KEY: True}, indent=2) + "\n")
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        save_published(DFlashModel(config), folder, dtype=torch.float32)
