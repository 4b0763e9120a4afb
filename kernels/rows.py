"""The ragged rows of one verify step. Knows their layout, not the model that fills them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ddtree.kernels.checks import check, check_int32
from ddtree.kernels.reference.attention_plan import AttentionPlan


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
    ancestors: Tensor  # [T, W] int32 bits over the sequence's own rows, LSB first, self included; unused where causal

    def __post_init__(self) -> None:
        """Raises ValueError for a wrong shape, dtype or device. Checked here because every layer uses the same rows."""
        device, sequences = self.row_offsets.device, self.q_len.shape[0]
        check_int32("row_offsets", self.row_offsets, (sequences + 1,), device)
        check_int32("q_len", self.q_len, (sequences,), device)
        check_int32("seq_len", self.seq_len, (sequences,), device)
        check_int32("page_table", self.page_table, (sequences, None), device)
        check("causal", self.causal, (sequences,), (torch.bool,), device)
        check_int32("ancestors", self.ancestors, (None, None), device)
        if self.page_size < 1:
            raise ValueError(f"page_size is {self.page_size}; pass 1 or more.")

    @cached_property
    def plan(self) -> AttentionPlan:
        """What the reference derives once per step and uses in every layer."""
        return AttentionPlan.of(
            self.row_offsets, self.q_len, self.seq_len, self.page_table, self.page_size, self.causal, self.ancestors
        )
