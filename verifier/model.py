"""The part of a step that a backend brings. Knows no backend."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ddtree.kernels import Rows


class Model(Protocol):
    """A loaded model. Every rank of a group has one."""

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Writes the rows' K/V to their slots and attends.

        Args:
            tokens, positions: [T] int32.
            slots: [T] int64, page * page_size + offset.
        Returns: hidden [T, d] after the final norm, features [T, F] of the feature layers side by side.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[M, V] of hidden [M, d]; None on a rank that does not draw."""
        ...
