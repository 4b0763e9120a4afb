"""Stage 4: the path head learns beside its finished drafter, which stays as it is. Knows no prompts."""

from __future__ import annotations

import time
from typing import Any

import torch

from ddtree.drafter.dflash import DFlashModel
from ddtree.drafter.training.options import Report
from ddtree.drafter.training.trainer import TICK_SECONDS, Trainer, schedule


def train_head(trainer: Trainer, model: DFlashModel, report: Report) -> dict[str, Any]:
    """Trains the head of `trainer.path` for `options.path_seconds`, from the beginning where it was interrupted.

    Args:
        trainer: knows rows, target and masks; its model gets the weights of `model` and is not trained.
        model: the finished drafter, for unscaled features.
    Returns:
        What `Trainer.validate` measures with the head, and the steps.
    """
    o = trainer.options
    trainer.freeze(model)
    generator = torch.Generator(trainer.device).manual_seed(o.seed)
    begun, told = time.time(), 0.0
    while (elapsed := trainer.ranks.first(time.time() - begun)[0]) < o.path_training:
        if time.time() - told > TICK_SECONDS:
            told = time.time()
            report("path", min(1.0, elapsed / o.path_training), f"step {trainer.step}, {elapsed:.0f} s")
        trainer.learn(generator, schedule(elapsed / o.path_training, o.warmup))
    return trainer.validate()["path"] | {"step": trainer.step}
