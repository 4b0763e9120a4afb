"""Lays out one verify step: entries, their trees and the paths to commit become one ragged `VerifyBatch`.

Knows tensors, sequences and pages; no model, no Ray. Nothing here waits for a device: row counts come from the budgets, which
the host knows, and where a tree has fewer nodes than its budget its last rows are padding. So a batch can be made before its
trees are: what depends on them is gathered where they are once they are built, and prompt rows beside it go there in one
copy; the rest stays on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddtree.deployments.edits import lay_out_edits
from ddtree.deployments.logprobs import LogprobLayout, lay_out_logprobs
from ddtree.deployments.requests import SamplingParams
from ddtree.deployments.scheduler import Entry
from ddtree.deployments.sequence import Sequence
from ddtree.kernels import DraftTree, Rows
from ddtree.kernels.tree import Allocate
from ddtree.verifier.batch import Commit, LogitEdits, SamplingRows, TokenMasks, VerifyBatch
from ddtree.verifier.transfer import to_device


@dataclass(frozen=True)
class Layout:
    """A batch but for its trees, and where each sequence's rows are in it. Sequence i of the batch is entry i: trees first,
    then prompt chunks. Where nothing is drafted a tree is its root: the one pending token of its sequence, which needs no
    device to know, so it is laid out as a chunk."""

    row_offsets: list[int]  # [S+1]
    trees: int  # the first so many entries are trees
    drawn: list[int]  # indices of the prompt entries the target draws for; their y follow those of the trees
    logprobs: LogprobLayout | None
    _loose: _Loose
    _table: Tensor  # [S, P] int32, as the next three are of Rows
    _seq_len: Tensor  # [S] int32
    _causal: Tensor  # [S] bool
    _page_size: int
    _slots: Tensor  # [T] int64, as the next two are of VerifyBatch
    _sampling: SamplingRows | None
    _commit: Commit | None
    _edits: LogitEdits | None

    def batch(
        self, tree: DraftTree | None, masks: TokenMasks | None = None, empty: Allocate | None = None
    ) -> TreeBatch:
        """With the trees [B, N+1] of the drafted entries, which may not be built yet, and what grammars allow there. `empty`
        makes what is on the device of the trees."""
        loose = self._loose
        if tree is None:
            ancestors = torch.zeros(len(loose.tokens), 1, dtype=torch.int32)
            own = _TreeRows(loose.tokens, loose.positions, ancestors, loose.q_len)
        elif not len(loose.tokens) and loose.nodes is None:
            own = _TreeRows(*_flat(tree), tree.n_nodes)
        else:
            device = tree.tokens.device
            loose = to_device(loose, device)
            empty = empty or partial(torch.empty, dtype=torch.int32, device=device)
            n, words = self.row_offsets[-1], tree.ancestors.shape[2]
            own = _TreeRows(empty((n,)), empty((n,)), empty((n, words)), empty((len(loose.q_len),)))
        rows = Rows(
            row_offsets=_int32(self.row_offsets),
            q_len=own.q_len,
            seq_len=self._seq_len,
            page_table=self._table,
            page_size=self._page_size,
            causal=self._causal,
            ancestors=own.ancestors,
        )
        wanted = self.logprobs.rows if self.logprobs else None
        batch = VerifyBatch(
            own.tokens, own.positions, self._slots, rows, self._sampling, self._commit, self._edits, masks, wanted
        )
        return TreeBatch(batch, tree, self.row_offsets[self.trees], loose, own)


@dataclass(frozen=True)
class TreeBatch:
    """A batch with the trees whose rows it has."""

    batch: VerifyBatch
    tree: DraftTree | None
    _tree_rows: int  # the first rows of the batch
    _loose: _Loose  # on the trees' device
    _own: _TreeRows

    def gather(self) -> None:
        """The trees are built: their rows go where they belong, and those that no tree has beside them."""
        own, loose, tree, n = self._own, self._loose, self.tree, self._tree_rows
        if tree is None or own.q_len is tree.n_nodes:
            return
        for to, of_nodes in zip((own.tokens, own.positions, own.ancestors), _flat(tree), strict=True):
            if loose.nodes is None:
                to[:n] = of_nodes
            else:
                torch.index_select(of_nodes, 0, loose.nodes, out=to[:n])
        own.tokens[n:], own.positions[n:], own.ancestors[n:] = loose.tokens, loose.positions, 0
        trees = len(tree.n_nodes)
        torch.minimum(loose.q_len[:trees], tree.n_nodes, out=own.q_len[:trees])
        own.q_len[trees:] = loose.q_len[trees:]


@dataclass(frozen=True)
class _TreeRows:
    """What of a batch depends on its trees."""

    tokens: Tensor  # [T] int32, as the others are of VerifyBatch and Rows
    positions: Tensor
    ancestors: Tensor
    q_len: Tensor


@dataclass(frozen=True)
class _Loose:
    """Rows that no tree has, and which rows of the trees are wanted: what goes to where the trees are."""

    tokens: Tensor  # [rows of chunks] int32
    positions: Tensor  # [rows of chunks] int32
    q_len: Tensor  # [S] int32, of trees the most that it can be
    nodes: Tensor | None  # [rows of trees] int64, which of the B · (N+1) nodes each is; None: all, in order


def lay_out(entries: list[Entry], budgets: list[int], width: int, page_size: int, scratch_page: int) -> Layout:
    """`entries`: trees first, then prompts; `budgets`: the trees' node counts besides the root, all 0 where none is drafted, of
    trees that lie in tensors of `width` nodes each.

    Rows that are in the pool for good (`Sequence.stored`) write to `scratch_page`, which belongs to no sequence.
    """
    counts = [budget + 1 for budget in budgets] + [entry.rows for entry in entries[len(budgets) :]]
    offsets = [0, *accumulate(counts)]
    sequences = [entry.sequence for entry in entries]
    computed = [sequence.computed for sequence in sequences]
    drafted = any(budgets)
    trees = len(budgets) if drafted else 0
    chunks = [(sequences[i].tokens, range(computed[i], computed[i] + counts[i])) for i in range(trees, len(entries))]
    loose = _Loose(
        tokens=_int32([token for tokens, span in chunks for token in tokens[span.start : span.stop]]),
        positions=_int32([at for _, span in chunks for at in span]),
        q_len=_int32(counts),
        nodes=_nodes(budgets, width) if drafted else None,
    )
    table = page_table(sequences)
    drawn = [i for i in range(len(budgets), len(entries)) if entries[i].finishes]
    return Layout(
        offsets,
        len(budgets),
        drawn,
        lay_out_logprobs(entries, offsets, len(budgets), drawn),
        loose,
        table,
        _int32(computed),
        torch.from_numpy(np.arange(len(entries)) >= trees),
        page_size,
        _slots(table, computed, counts, [s.stored for s in sequences], page_size, scratch_page),
        _sampling(entries, offsets, len(budgets), drawn),
        _commit(sequences),
        lay_out_edits(entries, offsets, len(budgets), drawn),
    )


def page_table(sequences: list[Sequence]) -> Tensor:
    """[S, P] int32, padded with page 0, which is never read past a sequence's end."""
    table = np.zeros((len(sequences), max((len(s.pages) for s in sequences), default=0)), np.int32)
    for row, sequence in zip(table, sequences, strict=True):
        row[: len(sequence.pages)] = sequence.pages
    return torch.from_numpy(table)


def _nodes(budgets: list[int], width: int) -> Tensor | None:
    """See _Loose."""
    if all(budget + 1 == width for budget in budgets):
        return None
    return torch.from_numpy(np.concatenate([np.arange(budget + 1) + i * width for i, budget in enumerate(budgets)]))


def _flat(tree: DraftTree) -> tuple[Tensor, Tensor, Tensor]:
    """token, position and ancestors of all nodes, tree after tree; views."""
    return tree.tokens.flatten(), tree.position.flatten(), tree.ancestors.flatten(0, 1)


def _slots(
    table: Tensor, computed: list[int], counts: list[int], stored: list[int], page_size: int, scratch_page: int
) -> Tensor:
    """Row i of a sequence goes to its slot computed + i: flat index page * page_size + offset, [T] int64."""
    at = np.concatenate([np.arange(start, start + n) for start, n in zip(computed, counts, strict=True)])
    sequence = np.repeat(np.arange(len(counts)), counts)
    page = np.where(at < np.array(stored)[sequence], scratch_page, table.numpy()[sequence, at // page_size])
    return torch.from_numpy(page * page_size + at % page_size)


def _sampling(entries: list[Entry], offsets: list[int], trees: int, drawn: list[int]) -> SamplingRows | None:
    counts = [end - begin for begin, end in pairwise(offsets[: trees + 1])] + [1] * len(drawn)
    params = [entries[i].sequence.request.sampling for i in [*range(trees), *drawn]]
    if offsets[trees] + len(drawn) == offsets[-1] and all(p.greedy for p in params):
        return None
    row = np.concatenate((np.arange(offsets[trees]), [offsets[i + 1] - 1 for i in drawn]))
    return SamplingRows(torch.from_numpy(row.astype(np.int32)), *_repeated(tuple(params), tuple(counts)))


@lru_cache(maxsize=64)  # from round to round the same sequences decode with trees of the same size
def _repeated(params: tuple[SamplingParams, ...], counts: tuple[int, ...]) -> tuple[Any, ...]:
    """temperature, top_p, top_k, seed and min_p of every row; nobody writes to them."""

    def each(values: list[Any], dtype: Any) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype), counts))

    return (
        each([p.temperature for p in params], np.float32),
        each([p.top_p for p in params], np.float32),
        each([p.top_k for p in params], np.int32),
        each([p.seed for p in params], np.int64),
        each([p.min_p for p in params], np.float32) if any(p.min_p for p in params) else None,
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
    return torch.from_numpy(np.array(values, np.int32))
