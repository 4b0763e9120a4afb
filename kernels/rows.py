"""The ragged rows of one verify step. Knows their layout, not the model that fills them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import Tensor

from ddtree.kernels.checks import check, check_int32

Derived = TypeVar("Derived")


@dataclass(frozen=True, eq=False)
class Rows:
    """Query rows of S sequences, T in all: prompt chunks and draft trees in one call. Written by the verifier.

    Row i of sequence s is row_offsets[s] + i of the queries; its own key and value lie at slot seq_len[s] + i of the
    sequence. It sees the seq_len[s] committed slots and, of the step's own rows, those that `causal` or `ancestors`
    name. The tensors must not change once an attention call has seen them: what is derived from them is kept.
    """

    row_offsets: Tensor  # [S+1] int32, row_offsets[0] = 0, row_offsets[S] = T
    q_len: Tensor  # [S] int32 rows in use, at most the capacity row_offsets[s+1] - row_offsets[s]
    seq_len: Tensor  # [S] int32 committed KV rows before this step
    page_table: Tensor  # [S, P] int32 page of each run of page_size slots; garbage past the end
    page_size: int  # slots in a page
    causal: Tensor  # [S] bool: row i sees own rows ≤ i (a prompt chunk); else `ancestors` decides (a tree)
    ancestors: Tensor  # [T, W] int32 bits over own rows ≤ i (parents come first), LSB first, self included; unused where causal
    _kept: dict[Hashable, object] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Raises ValueError for a wrong shape or dtype. Checked here because every layer uses the same rows."""
        self._check(None)
        if self.page_size < 1:
            raise ValueError(f"page_size is {self.page_size}; pass 1 or more.")

    def must_be_on(self, device: torch.device) -> None:
        """Raises ValueError where a tensor is elsewhere. On their way rows may lie in several places."""
        self.keep(("checked", device), lambda: self._check(device))

    def _check(self, device: torch.device | None) -> None:
        sequences = self.q_len.shape[0]
        check_int32("row_offsets", self.row_offsets, (sequences + 1,), device)
        check_int32("q_len", self.q_len, (sequences,), device)
        check_int32("seq_len", self.seq_len, (sequences,), device)
        check_int32("page_table", self.page_table, (sequences, None), device)
        check("causal", self.causal, (sequences,), (torch.bool,), device)
        check_int32("ancestors", self.ancestors, (None, None), device)

    def keep(self, key: Hashable, make: Callable[[], Derived]) -> Derived:
        """What an implementation derives from the rows once per step and uses in every layer."""
        if key not in self._kept:
            self._kept[key] = make()
        return cast(Derived, self._kept[key])
