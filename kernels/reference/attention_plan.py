"""What attention over one step's rows needs beside the tensors of a layer: slots and masks. Knows no head or layer.

A step calls attention once per layer with the same rows, so this is derived once and kept (`Rows.keep`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddtree.kernels.rows import Rows
from ddtree.kernels.tree import WORD_BITS


@dataclass(eq=False)
class Segment:
    """The rows of one sequence, and all that those in use may see."""

    begin: int  # first of its rows, out of T
    count: int  # q: its rows in use
    unused: int  # its rows after those
    slots: Tensor  # [n] int64 flat cache slots: the committed prefix, then the step's own rows
    visible: Tensor | None  # [q, n] bool; None: every row sees everything
    _biases: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def bias(self, heads: int, dtype: torch.dtype) -> Tensor | None:
        """0 where visible, -inf elsewhere, [q * heads, n]: a query row is repeated for the heads that share a key."""
        if self.visible is None:
            return None
        if (heads, dtype) not in self._biases:
            bias = torch.zeros(self.visible.shape, dtype=dtype, device=self.visible.device)
            self._biases[heads, dtype] = bias.masked_fill_(~self.visible, -torch.inf).repeat_interleave(heads, 0)
        return self._biases[heads, dtype]


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """One segment per sequence, in order; together they are the T rows."""

    segments: list[Segment]

    @classmethod
    def of(cls, rows: Rows) -> AttentionPlan:
        """Raises ValueError where the rows contradict each other."""
        offsets, total = rows.row_offsets.tolist(), rows.ancestors.shape[0]
        page_table, page_size, ancestors = rows.page_table, rows.page_size, rows.ancestors
        if offsets[0] != 0 or offsets[-1] != total:
            raise ValueError(f"row_offsets must run from 0 to T = {total} (rows of ancestors); got {offsets}.")
        segments = []
        sizes = zip(rows.q_len.tolist(), rows.seq_len.tolist(), rows.causal.tolist(), strict=True)
        for s, (count, committed, is_causal) in enumerate(sizes):
            begin, capacity = offsets[s], offsets[s + 1] - offsets[s]
            if not 0 <= count <= capacity:
                raise ValueError(f"q_len[{s}] is {count}; the sequence has {capacity} rows.")
            if committed < 0 or committed + count > page_table.shape[1] * page_size:
                raise ValueError(
                    f"Sequence {s} needs {committed + count} slots; its page table has "
                    f"{page_table.shape[1]} pages of {page_size}."
                )
            slots = _slots(page_table[s], page_size, committed + count)
            if is_causal:
                own = torch.ones(count, count, dtype=torch.bool, device=slots.device).tril_()
            else:
                own = _unpack(ancestors[begin : begin + count])
            visible = None if bool(own.all()) else torch.nn.functional.pad(own, (committed, 0), value=True)
            segments.append(Segment(begin, count, capacity - count, slots, visible))
        return cls(segments)


def _slots(pages: Tensor, page_size: int, count: int) -> Tensor:
    """Flat slots of a sequence's first `count` rows. Page entries past them are not read."""
    pages = pages[: (count + page_size - 1) // page_size].long()
    return (pages[:, None] * page_size + torch.arange(page_size, device=pages.device)).flatten()[:count]


def _unpack(ancestors: Tensor) -> Tensor:
    """[q, W] int32 bits → [q, q] bool."""
    node = torch.arange(len(ancestors), device=ancestors.device)
    if len(node) > ancestors.shape[1] * WORD_BITS:
        raise ValueError(f"{len(node)} tree rows need more than the {ancestors.shape[1]} ancestor words given.")
    return (ancestors[:, node // WORD_BITS] >> (node % WORD_BITS)).bitwise_and_(1).bool()
