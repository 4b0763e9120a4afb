"""Muon for the matrices, AdamW for the norms, on fp32 masters of a bf16 model (Jordan et al. 2024).

torch.optim.Muon orthogonalises one matrix at a time; here all matrices of a shape go through Newton-Schulz in one batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ddtree.drafter.training.ranks import ALONE, Ranks


def orthogonalise(stack: Tensor) -> Tensor:
    """`[n, r, c]` → the nearest (semi-)orthogonal matrices, singular values within about 0.7 to 1.2, in fp32."""
    x = stack.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).float()


class Optimiser:
    """Steps the masters and copies them into the model's parameters."""

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, norm_lr: float, decay: float, ranks: Ranks = ALONE
    ) -> None:
        """`ranks`: the processes whose gradients are summed; each of them takes the whole step."""
        self.ranks = ranks
        self.params: list[Tensor] = list(params)
        self.lr, self.norm_lr, self.decay = lr, norm_lr, decay
        self.masters: list[Tensor] = [nn.Parameter(p.detach().float().clone()) for p in self.params]
        ranks.copy_(self.masters)
        self.groups: dict[tuple[int, ...], list[Tensor]] = {}
        for master in self.masters:
            if master.ndim == 2:
                self.groups.setdefault(tuple(master.shape), []).append(master)
        self.momentum = [torch.zeros(len(g), *shape, device=g[0].device) for shape, g in self.groups.items()]
        norms = [m for m in self.masters if m.ndim != 2]
        self.adam = torch.optim.AdamW(norms, lr=norm_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=norms[0].is_cuda)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update with `scale` (0..1) times the learning rates; the model's gradients are consumed."""
        for master, param in zip(self.masters, self.params, strict=True):
            master.grad = torch.zeros_like(master) if param.grad is None else param.grad.float()
            param.grad = None
        self.ranks.sum_all_([m.grad for m in self.masters if m.grad is not None])
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        for (shape, group), momentum in zip(self.groups.items(), self.momentum, strict=True):
            grad = torch.stack([m.grad for m in group if m.grad is not None])
            momentum.lerp_(grad, 0.05)
            update = orthogonalise(grad.lerp(momentum, 0.95)) * max(1.0, shape[0] / shape[1]) ** 0.5
            torch._foreach_mul_(group, 1 - self.lr * scale * self.decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-self.lr * scale)
        self.adam.param_groups[0]["lr"] = self.norm_lr * scale
        self.adam.step()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Copies the masters into the model."""
        torch._foreach_copy_(self.params, self.masters)

    def state(self) -> dict[str, Any]:
        """For `restore`; tensors are shared, not copied."""
        return {
            "masters": [m.detach() for m in self.masters],
            "momentum": self.momentum,
            "adam": self.adam.state_dict(),
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Goes on where `state()` was taken."""
        torch._foreach_copy_(self.masters, [t.to(self.masters[0].device) for t in state["masters"]])
        torch._foreach_copy_(self.momentum, [t.to(self.masters[0].device) for t in state["momentum"]])
        self.adam.load_state_dict(state["adam"])
        self.publish()
