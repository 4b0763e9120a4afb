"""Stage 4: the path head learns beside its finished drafter, which stays as it is. Knows no prompts.

A new head is bilinear (path_head.py). It begins with the target's embedding in as few directions as it has, and adds nothing. The
token before a slot is the text's own, as it is on a path that is accepted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree.drafter.dflash import DFlashModel
from ddtree.drafter.path_head import BEFORE, GATE, ITSELF, PathHead
from ddtree.drafter.training.options import Report
from ddtree.drafter.training.rows import Blocks, batch_index, sample_blocks
from ddtree.drafter.training.trainer import Seen, Trainer, schedule

LEARNING_RATE = 2e-3
TICK_SECONDS = 1.0


class PathTrainer:
    """One head in training, for `options.path_seconds`; it begins anew where it was interrupted."""

    def __init__(self, trainer: Trainer, model: DFlashModel, begin: Mapping[str, Tensor], trained: bool) -> None:
        """
        Args:
            trainer: knows rows, target and masks; its model gets the weights of `model`.
            model: the finished drafter, for unscaled features.
            begin: the tensors of the head that training begins with; they stay.
            trained: they are no new ones.
        """
        self.trainer, self.target = trainer, trainer.target
        self.rate = LEARNING_RATE * (trainer.options.initial_rate if trained else 1.0)
        trainer.model.requires_grad_(False).load_state_dict(model.state_dict())  # which is compiled, on a GPU
        trainer.feature_size = torch.ones(model.fc.weight.shape[1], device=trainer.device)
        tensors = {name: tensor.to(trainer.device, torch.float32, copy=True) for name, tensor in begin.items()}
        self.tensors = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
        vocab, width = self.target.embedding.shape
        self.head = PathHead(self.tensors, vocab_size=vocab, hidden_size=width)

    def fit(self, report: Report) -> dict[str, Any]:
        """Trains, and returns what `Trainer.validate` measures with the head."""
        o, trainer = self.trainer.options, self.trainer
        optimiser = torch.optim.AdamW(self.tensors.values(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        generator = torch.Generator(trainer.device).manual_seed(o.seed)
        begun, told, step = time.time(), 0.0, 0
        while (elapsed := time.time() - begun) < o.path_training:
            if time.time() - told > TICK_SECONDS:
                told = time.time()
                report("path", min(1.0, elapsed / o.path_training), f"step {step}, {elapsed:.0f} s")
            rows = trainer.train.take(batch_index(len(trainer.train), o.batch, step, o.seed + 1).to(trainer.device))
            with torch.no_grad():
                seen = trainer.observe(rows)
                blocks = sample_blocks(rows, o.anchors, o.block, generator)
                drafted = trainer.draft(blocks, seen)
            _, of_before, of_itself, _ = self._loss(blocks, drafted, seen)
            self._before(blocks, drafted).backward(of_before)
            self.tensors[ITSELF].grad = of_itself
            for group in optimiser.param_groups:
                group["lr"] = self.rate * schedule(elapsed / o.path_training, o.warmup)
            optimiser.step()
            optimiser.zero_grad()
            step += 1
        with torch.no_grad():
            return trainer.validate(loss=self._validation_loss) | {"step": step}

    def _before(self, blocks: Blocks, drafted: Tensor) -> Tensor:
        """`[B, A·(block-1), 1, r]` what is multiplied with each token's row."""
        return self.head.gated(drafted.flatten(1, 2).float(), blocks.token[:, :, :-1].flatten(1)[..., None])

    def _validation_loss(self, blocks: Blocks, drafted: Tensor, seen: Seen) -> tuple[Tensor, Tensor, Tensor]:
        loss, _, _, hits = self._loss(blocks, drafted, seen)
        return loss, drafted, hits

    @torch.no_grad()
    def _loss(self, blocks: Blocks, drafted: Tensor, seen: Seen) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`(loss [], gradients of what _before gives and of the tokens' rows, hits)`, see `Trainer.score`."""
        head, flat = self.target.head, drafted.reshape(-1, drafted.shape[-1])
        before = self._before(blocks, drafted)
        of_path = before.reshape(-1, before.shape[-1]).to(head.dtype)
        itself = self.tensors[ITSELF].to(head.dtype)
        grad, of_itself = torch.empty_like(of_path), torch.zeros_like(self.tensors[ITSELF])

        def logits(part: slice) -> Tensor:
            return F.linear(flat[part], head).addmm_(of_path[part], itself.T)

        def take(part: slice, gradient: Tensor) -> None:
            grad[part] = gradient @ itself
            of_itself.add_(gradient.T @ of_path[part])

        loss, total, hits = self.trainer.score(blocks, seen, logits, take)
        return loss, (grad.float() / total).view_as(before), of_itself / total, hits


def initialise(embedding: Tensor, rank: int, seed: int) -> dict[str, Tensor]:
    """fp32 tensors of a head that adds nothing yet. Raises ValueError where the rank is more than the embedding's."""
    wide = embedding.float()
    vocab, width = wide.shape
    if rank > width:
        raise ValueError(f"a path head of rank {rank} for hidden states of {width}: give a smaller path_rank")
    main = torch.linalg.eigh(wide.T @ wide)[1][:, -rank:]
    rows = wide @ main
    gate = torch.randn(rank, width, generator=torch.Generator().manual_seed(seed)) * 0.02
    return {BEFORE: rows / rows.square().mean().sqrt(), ITSELF: wide.new_zeros(vocab, rank), GATE: gate.to(wide.device)}
