"""A path head in training: its tensors, their gradients and steps. Knows neither batches nor a loop.

A new head begins with the target's embedding in as few directions as it has, and adds nothing. The token before a slot is the
text's own, as it is on a path that is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ddtree.drafter.path_head import BEFORE, GATE, GATE_BIAS, GATE_PROJ, ITSELF, MLP_BIAS, MLP_DOWN, MLP_UP, PathHead
from ddtree.drafter.training.losses import Graded
from ddtree.drafter.training.ranks import ALONE, Ranks
from ddtree.drafter.training.rows import Blocks

LEARNING_RATE = 2e-3


class PathLearner:
    """One head, in fp32."""

    def __init__(self, begin: Mapping[str, Tensor], embedding: Tensor, rate: float = 1.0, ranks: Ranks = ALONE) -> None:
        """
        Args:
            begin: the tensors training begins with; they stay.
            embedding: the target's, `[V, d]`.
            rate: times the usual learning rate.
            ranks: the processes whose gradients are summed.
        """
        self.ranks = ranks
        copies = {name: tensor.to(embedding.device, torch.float32, copy=True) for name, tensor in begin.items()}
        self.tensors = {name: tensor.requires_grad_() for name, tensor in copies.items()}
        ranks.copy_(list(self.tensors.values()))
        self.head = PathHead(self.tensors, vocab_size=len(embedding), hidden_size=embedding.shape[1])
        self.rate = LEARNING_RATE * rate
        self.adam = torch.optim.AdamW(self.tensors.values(), lr=self.rate, betas=(0.9, 0.95), weight_decay=0.0)

    def factors(self, blocks: Blocks, drafted: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, A, block-1, r]` and `[V, r]`, whose product the head adds to the logits of drafted `[B, A, block-1, d]`."""
        before = blocks.token[:, :, :-1].flatten(1)[..., None]
        of_slots = self.head.gated(drafted.flatten(1, 2).float(), before)
        return of_slots.view(*drafted.shape[:-1], -1), self.tensors[ITSELF]

    def step(self, graded: Graded, scale: float) -> None:
        """One update with `scale` times the learning rate, once the slots' gradient went backward; gradients are consumed."""
        self.tensors[ITSELF].grad = graded.of_itself
        self.ranks.sum_all_([tensor.grad for tensor in self.tensors.values() if tensor.grad is not None])
        self.adam.param_groups[0]["lr"] = self.rate * scale
        self.adam.step()
        self.adam.zero_grad()

    def state(self) -> dict[str, Any]:
        """For `restore`; tensors are shared, not copied."""
        return {
            "tensors": {name: tensor.detach() for name, tensor in self.tensors.items()},
            "adam": self.adam.state_dict(),
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Goes on where `state()` was taken."""
        for name, tensor in self.tensors.items():
            tensor.copy_(state["tensors"][name])
        self.adam.load_state_dict(state["adam"])


def new_head(kind: str, embedding: Tensor, rank: int, seed: int) -> dict[str, Tensor]:
    """fp32 tensors of a head of one of `PATH_KINDS` that adds nothing yet. Raises ValueError where the rank is more than the
    embedding's."""
    wide = embedding.float()
    vocab, width = wide.shape
    if rank > width:
        raise ValueError(f"a path head of rank {rank} for hidden states of {width}: give a smaller path_rank")
    main = torch.linalg.eigh(wide.T @ wide)[1][:, -rank:]
    rows = wide @ main
    head = {BEFORE: rows / rows.square().mean().sqrt(), ITSELF: wide.new_zeros(vocab, rank)}
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int, size: float) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * size).to(wide.device)

    if kind == "bilinear":
        head[GATE] = random(rank, width, 0.02)
    elif kind == "gated":
        head |= {GATE_PROJ: random(rank, width + rank, 0.02), GATE_BIAS: wide.new_zeros(rank)}
    elif kind == "mlp":
        inner = 2 * rank
        head[MLP_UP] = torch.cat([random(inner, width, 0.02), random(inner, rank, rank**-0.5)], 1)
        head |= {MLP_BIAS: wide.new_zeros(inner), MLP_DOWN: random(rank, inner, inner**-0.5)}
    return head
