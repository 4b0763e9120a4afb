"""Lays out one verify step: entries, their trees and the paths to commit become one ragged `VerifyBatch`.

Knows tensors, sequences and pages; no model, no Ray. Nothing here waits for a device: row counts come from the budgets, which
the host knows, and where a tree has fewer nodes than its budget its last rows are padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.deployments.requests import SamplingParams
from ddtree.deployments.scheduler import Entry
from ddtree.deployments.sequence import Sequence
from ddtree.kernels import DraftTree, Rows
from ddtree.verifier.batch import Commit, SamplingRows, VerifyBatch


@dataclass(frozen=True)
class Layout:
    """A batch and where each sequence's rows are in it. Sequence i of the batch is entry i: trees first, then prompt chunks."""

    batch: VerifyBatch
    row_offsets: list[int]  # [S+1]
    trees: int  # the first so many entries are trees
    drawn: list[int]  # indices of the prompt entries the target draws for; their y follow those of the trees

    def tree_y(self, y: Tensor, tree: DraftTree) -> Tensor:
        """y [M] of the step -> [B, N+1] per node of each tree, -1 where a tree has no such row."""
        out = torch.full_like(tree.tokens, -1)
        for i in range(self.trees):
            first, last = self.row_offsets[i], self.row_offsets[i + 1]
            out[i, : last - first] = y[first:last]
        return out


def lay_out(
    entries: list[Entry], tree: DraftTree | None, budgets: list[int], page_size: int, scratch_page: int
) -> Layout:
    """`entries`: trees first, then prompts; `tree` holds the trees [B, N+1], `budgets` their node counts besides the root.

    Rows that are in the pool for good (`Sequence.stored`) write to `scratch_page`, which belongs to no sequence.
    """
    counts = [budget + 1 for budget in budgets] + [entry.rows for entry in entries[len(budgets) :]]
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    chunks = entries[len(budgets) :]
    tokens, positions, ancestors = _tree_rows(tree, budgets)
    for entry in chunks:
        start = entry.sequence.computed
        tokens.append(_int32(entry.sequence.tokens[start : start + entry.rows]))
        positions.append(torch.arange(start, start + entry.rows, dtype=torch.int32))
        ancestors.append(torch.zeros(entry.rows, ancestors[0].shape[1] if ancestors else 1, dtype=torch.int32))
    computed = [entry.sequence.computed for entry in entries]
    q_len = _int32(counts)
    if tree is not None:
        q_len[: len(budgets)] = torch.minimum(q_len[: len(budgets)], tree.n_nodes)
    table = page_table([entry.sequence for entry in entries])
    rows = Rows(
        row_offsets=_int32(offsets),
        q_len=q_len,
        seq_len=_int32(computed),
        page_table=table,
        page_size=page_size,
        causal=torch.arange(len(entries)) >= len(budgets),
        ancestors=torch.cat(ancestors),
    )
    drawn = [i for i in range(len(budgets), len(entries)) if entries[i].finishes]
    batch = VerifyBatch(
        tokens=torch.cat(tokens),
        positions=torch.cat(positions),
        slots=_slots(table, computed, counts, [entry.sequence.stored for entry in entries], page_size, scratch_page),
        rows=rows,
        sampling=_sampling(entries, offsets, len(budgets), drawn),
        commit=_commit([entry.sequence for entry in entries]),
    )
    return Layout(batch, offsets, len(budgets), drawn)


def page_table(sequences: list[Sequence]) -> Tensor:
    """[S, P] int32, padded with page 0, which is never read past a sequence's end."""
    width = max((len(s.pages) for s in sequences), default=0)
    return torch.tensor([s.pages + [0] * (width - len(s.pages)) for s in sequences], dtype=torch.int32)


def _tree_rows(tree: DraftTree | None, budgets: list[int]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    if tree is None:
        return [], [], []
    parts = [(i, slice(0, budget + 1)) for i, budget in enumerate(budgets)]
    return (
        [tree.tokens[i, rows] for i, rows in parts],
        [tree.position[i, rows] for i, rows in parts],
        [tree.ancestors[i, rows] for i, rows in parts],
    )


def _slots(
    table: Tensor, computed: list[int], counts: list[int], stored: list[int], page_size: int, scratch_page: int
) -> Tensor:
    """Row i of a sequence goes to its slot computed + i: flat index page * page_size + offset, [T] int64."""
    at = torch.cat([torch.arange(start, start + n) for start, n in zip(computed, counts, strict=True)])
    sequence = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    page = torch.where(at < torch.tensor(stored)[sequence], scratch_page, table[sequence, at // page_size].long())
    return page * page_size + at % page_size


def _sampling(entries: list[Entry], offsets: list[int], trees: int, drawn: list[int]) -> SamplingRows:
    rows = list(range(offsets[trees])) + [offsets[i + 1] - 1 for i in drawn]
    params: list[SamplingParams] = []
    for i in range(trees):
        params += [entries[i].sequence.request.sampling] * (offsets[i + 1] - offsets[i])
    params += [entries[i].sequence.request.sampling for i in drawn]
    return SamplingRows(
        row=_int32(rows),
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32),
        top_k=_int32([p.top_k for p in params]),
        seed=torch.tensor([p.seed for p in params], dtype=torch.int64),
    )


def _commit(sequences: list[Sequence]) -> Commit | None:
    """The paths whose KV rows have to move; a path 0, 1, 2, … lies where it belongs."""
    moved = [(s, s.accepted) for s in sequences if s.accepted and s.accepted.path != list(range(len(s.accepted.path)))]
    if not moved:
        return None
    width = max(len(accepted.path) for _, accepted in moved)
    return Commit(
        page_table=page_table([s for s, _ in moved]),
        seq_len=_int32([accepted.base for _, accepted in moved]),
        path=torch.tensor([a.path + [-1] * (width - len(a.path)) for _, a in moved], dtype=torch.int32),
        n_accepted=_int32([len(accepted.path) for _, accepted in moved]),
    )


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
