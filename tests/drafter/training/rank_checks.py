"""Steps of training by as many processes as torchrun starts: `torchrun … rank_checks.py TARGET RUN`. RUN has answers; the first
process prints the losses, the last validation and sums over what the first gradient changed as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddtree.drafter.config import DrafterConfig, Rope
from ddtree.drafter.training import TrainOptions
from ddtree.drafter.training.answers import AnswerStore
from ddtree.drafter.training.path_learner import PathLearner, new_head
from ddtree.drafter.training.ranks import Ranks
from ddtree.drafter.training.rows import pack_rows, split
from ddtree.drafter.training.target import Target
from ddtree.drafter.training.trainer import Trainer

STEPS = 6
CPU = torch.device("cpu")


def steps(target_dir: Path, run: Path) -> dict[str, Any]:
    """What a few steps on batches of four rows come to."""
    torch.set_num_threads(1)
    ranks = Ranks.join()
    options = TrainOptions(
        target_dir=target_dir, out_dir=run, layers=2, block=8, context=256, max_new=48, batch=4, anchors=16, path_joint=0.5
    )  # fmt: skip
    config = DrafterConfig(
        hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=400,
        num_target_layers=6, target_layer_ids=(1, 3), block_size=8, mask_token_id=4, max_positions=256, rope=Rope(theta=1e4),
    )  # fmt: skip
    answers, _ = AnswerStore(run / "answers", np.uint16).load()
    rows = (pack_rows(answers, side, options.context, 0, CPU) for side in split(answers, 5))
    target = Target(target_dir, CPU, torch.float32)
    path = PathLearner(new_head("bilinear", target.embedding, 8, 0), target.embedding, ranks=ranks)
    trainer = Trainer(options, config, target, *rows, folder=run / "none", path=path, ranks=ranks)
    generator = torch.Generator().manual_seed(0)
    losses = [float(trainer.learn(generator, 1.0))]
    learnt = [*trainer.optimiser.momentum, *path.tensors.values()]
    first = [float(tensor.detach().abs().sum()) for tensor in learnt]  # what one gradient made of them
    losses += [float(trainer.learn(generator, 1.0)) for _ in range(STEPS)]
    found = {"first": first, "losses": losses, "validation": trainer.validate()}
    return found if ranks.leads else {}


if __name__ == "__main__":
    if result := steps(Path(sys.argv[1]), Path(sys.argv[2])):
        print(json.dumps(result))
