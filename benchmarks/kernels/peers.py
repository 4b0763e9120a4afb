"""Compiled peers from the wheel sglang-kernel (FlashMLA is in it), called the way sglang calls them. Knows no timing.

benchmarks/README.md says how to get the files. Every tensor form here is theirs: 64-bit indices, numbered candidates, next-child
links, log-sum-exp by head.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddtree.kernels import DraftTree

FILES = {"common": "common_ops.abi3.so", "flashmla": "flashmla_ops.abi3.so"}
VERSION = "sglang-kernel 0.4.6"


@dataclass(frozen=True)
class Peers:
    """Which of the wheel's files were found and loaded."""

    common: bool = False
    flashmla: bool = False

    @classmethod
    def load(cls, folder: Path | None) -> Peers:
        """Loads what lies anywhere below `folder`; a file built for another torch or GPU raises OSError."""
        loaded = {}
        for name, file in FILES.items():
            found = sorted(folder.rglob(file), key=lambda path: path.parent.name != "sm90") if folder else []
            if found:
                torch.ops.load_library(str(found[0]))
            loaded[name] = bool(found)
        return cls(**loaded)


def _op(name: str) -> Any:
    return getattr(torch.ops.sgl_kernel, name)


class SglangTrees:
    """Buffers of `build_tree_kernel_efficient` and `verify_tree_greedy` for a batch of trees.

    The first is given the chosen nodes (`selected_index`) and their parents; it writes mask, positions and links. It chooses
    nothing: in sglang, torch.topk and gathers before it do.
    """

    def __init__(self, tree: DraftTree, y: Tensor) -> None:
        self.tree = tree
        (self.batch, self.nodes), device = tree.tokens.shape, tree.tokens.device
        self.depth = int(tree.depth.max())
        selected, parents = _eagle_form(tree)
        self.selected, self.parents = selected.to(device), parents.to(device)
        self.seq_len = tree.position[:, 0].long()
        self.mask = torch.zeros(self.batch * self.nodes**2, dtype=torch.bool, device=device)
        self.positions = torch.zeros(self.batch * self.nodes, dtype=torch.int64, device=device)
        links = (torch.full((self.batch, self.nodes), -1, dtype=torch.int64, device=device) for _ in range(3))
        self.index, self.child, self.sibling = links
        self.tokens, self.y = tree.tokens.long(), y.long()
        self.predicts = torch.zeros(self.batch * self.nodes, dtype=torch.int32, device=device)
        self.path = torch.full((self.batch, tree.max_depth + 1), -1, dtype=torch.int32, device=device)
        self.accepted = torch.zeros(self.batch, dtype=torch.int32, device=device)
        self.build()

    def build(self) -> None:
        """Mask of the tree's own rows alone (mode 1), the cheaper of its forms. The links must be -1 before the first call."""
        _op("build_tree_kernel_efficient")(
            *(self.parents, self.selected, self.seq_len, self.mask, self.positions),
            *(self.index, self.child, self.sibling, self.nodes, self.depth, self.nodes, 1),
        )

    def accept(self) -> None:
        _op("verify_tree_greedy")(
            *(self.predicts, self.path, self.accepted, self.tokens),
            *(self.index, self.child, self.sibling, self.y),
        )

    def node_path(self) -> Tensor:
        """The accepted path in node indices of each tree, as tree_accept gives it."""
        first = self.nodes * torch.arange(self.batch, device=self.path.device, dtype=torch.int32)
        return torch.where(self.path >= 0, self.path - first[:, None], -1)


def _eagle_form(tree: DraftTree) -> tuple[Tensor, Tensor]:
    """A tree as EAGLE names it: candidate number = slot of the parent × width + rank, and each slot's own candidate."""
    batch, nodes = tree.tokens.shape
    levels = int(tree.depth.max())
    selected = torch.zeros(batch, nodes - 1, dtype=torch.int64)
    parents = torch.zeros(batch, nodes * (levels - 1) + 1, dtype=torch.int64)
    for b, (all_parents, depths) in enumerate(zip(tree.parent.tolist(), tree.depth.tolist(), strict=True)):
        rank, slot, used = [0] * nodes, [0] * nodes, [0] * (levels + 1)
        for i in range(1, nodes):
            parent, depth = all_parents[i], depths[i]
            selected[b, i - 1] = candidate = slot[parent] * nodes + rank[parent]
            rank[parent] += 1
            if depth < levels:
                slot[i] = 1 + nodes * (depth - 1) + used[depth]
                used[depth] += 1
                parents[b, slot[i]] = candidate
    return selected, parents


class FlashMla:
    """FlashMLA's dense decoding over the committed prefix, every row seeing all of it. Its schedule is made once."""

    def __init__(self, seq_len: Tensor, rows_per_sequence: int, scale: float) -> None:
        self.seq_len, self.rows, self.scale = seq_len, rows_per_sequence, scale
        self.schedule: tuple[Tensor | None, Tensor | None] = (None, None)

    def __call__(self, q: Tensor, cache: Tensor, page_table: Tensor) -> tuple[Tensor, Tensor]:
        """q [T, H, 576], cache [pages, 64, 576] → out [T, H, 512], lse [T, H]."""
        batch, heads = len(self.seq_len), q.shape[1]
        out, lse, *schedule = _op("dense_decode_fwd")(
            *(q.view(batch, self.rows, heads, -1), cache.unsqueeze(2), 512, self.seq_len, page_table),
            *(self.scale, False, *self.schedule),
        )
        self.schedule = schedule[0], schedule[1]
        return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


def merge_state(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    merged, merged_lse = torch.empty_like(out), torch.empty_like(lse)
    _op("merge_state_v2")(out, lse, other, other_lse, merged, merged_lse)
    return merged, merged_lse


def fast_topk(scores: Tensor, indices: Tensor, lengths: Tensor) -> None:
    """Indices of the 2048 largest of each float32 row: the only K it is compiled for, and no softmax."""
    _op("fast_topk")(scores, indices, lengths, None)
