"""Attention test cases: a size, a mix of trees and prompt chunks, and what lies in wait around them.

Inputs and results are on the CPU, with the oracles; only the operation itself runs on the case's device.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddtree.kernels import Rows, verify_attn, verify_attn_mla

from .devices import poisoned_memory, runs_cuda_sources
from .ref import attention_row, slot

GARBAGE = -(2**31)
SERVED = {4: 64, 8: 96, 16: 128, 20: 128, 24: 256}  # a width that the CUDA kernels serve, for each that is too small


@dataclass(frozen=True)
class Case:
    """kv, q, chunk: per sequence the committed rows, the rows in use, and whether they are a prompt chunk."""

    kv: tuple[int, ...]
    q: tuple[int, ...]
    chunk: tuple[bool, ...]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    v_dim: int | None = None  # set: the MLA form, whose one cache is key and value
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    padded_rows: int = 0  # capacity beyond q, whose queries are NaN
    garbage_pages: int = 0  # page table entries past the end that lead nowhere
    poison: bool = True  # NaN in every cache slot that belongs to no row in use
    seed: int = 0
    device: str = "cpu"

    @property
    def exact(self) -> bool:
        return self.dtype in (torch.float32, torch.float64)

    def on(self, device: str) -> Case:
        """The case on a device; for the CUDA kernels, which have 16-bit inputs only, at a width that they serve."""
        case = replace(self, device=device)
        if self.exact or not runs_cuda_sources(device):
            return case
        return replace(case, dim=576, v_dim=512) if self.v_dim else replace(case, dim=SERVED.get(self.dim, self.dim))


@dataclass(frozen=True)
class Inputs:
    case: Case
    q: Tensor  # [T, H, D]
    caches: list[Tensor]  # K and V, or the latent cache alone
    rows: Rows
    visible: list[list[list[int]]]  # of each sequence and row in use: own rows it sees

    def run(self) -> tuple[Tensor, Tensor]:
        case = self.case
        q, *caches = (x.to(case.device) for x in (self.q, *self.caches))
        tensors = {name: x.to(case.device) for name, x in vars(self.rows).items() if isinstance(x, Tensor)}
        rows, scale = replace(self.rows, **tensors), case.dim**-0.5
        with poisoned_memory() if runs_cuda_sources(case.device) and not case.exact else nullcontext():
            if case.v_dim is None:
                out, lse = verify_attn(q, *caches, rows, scale=scale)
            else:
                out, lse = verify_attn_mla(q, *caches, rows, scale=scale, v_dim=case.v_dim)
        return out.cpu(), lse.cpu()

    def place(self, sequence: int, row: int) -> tuple[int, int]:
        """Page and slot of a sequence's row, counted from its start."""
        return slot(self.rows.page_table[sequence].tolist(), self.case.page_size, row)

    def expected(self) -> tuple[Tensor, Tensor]:
        """float64, head by head and row by row."""
        case, total = self.case, len(self.q)
        out = torch.zeros(total, case.heads, case.v_dim or case.dim, dtype=torch.float64)
        lse = torch.full((total, case.heads), -torch.inf, dtype=torch.float64)
        for s, sequence in enumerate(self.visible):
            for i, own in enumerate(sequence):
                row = int(self.rows.row_offsets[s]) + i
                seen = [self.place(s, j) for j in [*range(case.kv[s]), *(case.kv[s] + j for j in own)]]
                pages, offsets = zip(*seen, strict=True)
                for h in range(case.heads):
                    if case.v_dim is None:
                        keys, values = (c[pages, offsets, h // (case.heads // case.kv_heads)] for c in self.caches)
                    else:
                        keys = self.caches[0][pages, offsets]
                        values = keys[:, : case.v_dim]
                    out[row, h], lse[row, h] = attention_row(self.q[row, h], keys, values, case.dim**-0.5)
        return out, lse


def make(case: Case) -> Inputs:
    random = torch.Generator().manual_seed(case.seed)
    sequences, size = len(case.kv), case.page_size
    capacity = [n + case.padded_rows for n in case.q]
    offsets = [sum(capacity[:s]) for s in range(sequences + 1)]
    used = [-(-(kv + q) // size) for kv, q in zip(case.kv, case.q, strict=True)]
    numbers = torch.randperm(sum(used) + 1, generator=random).tolist()
    tables = [[numbers.pop() for _ in range(n)] for n in used]
    width = max(used, default=0) + case.garbage_pages

    visible, words = [], -(-max(case.q, default=0) // 32) or 1
    ancestors = torch.full((offsets[-1], words), -1, dtype=torch.int32)  # garbage where it is not read
    for s, (count, chunk) in enumerate(zip(case.q, case.chunk, strict=True)):
        seen: list[list[int]] = []
        for i in range(count):
            parent = int(torch.randint(0, i, (1,), generator=random)) if i else 0
            seen.append(list(range(i + 1)) if chunk else [*(seen[parent] if i else []), i])
            if not chunk:
                bits = [sum(1 << j % 32 for j in seen[i] if j // 32 == w) for w in range(words)]
                ancestors[offsets[s] + i] = torch.tensor([b - (b >> 31 << 32) for b in bits], dtype=torch.int32)
        visible.append(seen)

    shape = (sum(used) + 1, size, case.dim) if case.v_dim else (sum(used) + 1, size, case.kv_heads, case.dim)
    caches = [torch.randn(shape, generator=random).to(case.dtype) for _ in range(1 if case.v_dim else 2)]
    q = torch.randn(offsets[-1], case.heads, case.dim, generator=random).to(case.dtype) * 2
    for s, count in enumerate(case.q):
        q[offsets[s] + count : offsets[s + 1]] = torch.nan
    entries = [table + [GARBAGE] * (width - len(table)) for table in tables]
    rows = Rows(
        row_offsets=torch.tensor(offsets, dtype=torch.int32),
        q_len=torch.tensor(case.q, dtype=torch.int32),
        seq_len=torch.tensor(case.kv, dtype=torch.int32),
        page_table=torch.tensor(entries, dtype=torch.int32).view(sequences, width),
        page_size=size,
        causal=torch.tensor(case.chunk, dtype=torch.bool),
        ancestors=ancestors,
    )
    inputs = Inputs(case, q, caches, rows, visible)
    if case.poison:
        free = torch.ones(shape[:2], dtype=torch.bool)
        for s in range(sequences):
            for j in range(case.kv[s] + case.q[s]):
                free[inputs.place(s, j)] = False
        for cache in caches:
            cache[free] = torch.nan
    return inputs
