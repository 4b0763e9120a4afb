"""Draft trees as SGLang's tree verification takes them, and accepted paths as its DFlash worker commits them.

Knows the shapes and dtypes of the release below (docs/sglang_integration.md says where they come from); knows none of its batches
and imports none of it. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.kernels.tree import WORD_BITS, DraftTree
from ddtree.kernels.tree_accept import tree_accept
from ddtree.kernels.tree_build import tree_build

RELEASE = "0.5.23"  # of SGLang; tests/kernels/integrations/test_sglang.py reads it


@dataclass(frozen=True, eq=False)
class VerifyTree:
    """The fields of `EagleVerifyInput` and `NgramVerifyInput` that describe trees of n = `draft_token_num` rows each.

    Rows past a tree's nodes are padding: no link leads to them, they see the prefix and themselves.
    """

    draft_token: Tensor  # [B·n] int64
    custom_mask: Tensor  # bool; [Σ n·(seq_len + n)] whole, or [B·n·n] of the trees alone
    positions: Tensor  # [B·n] int64
    retrieve_index: Tensor  # [B, n] int64 row of the batch
    retrieve_next_token: Tensor  # [B, n] int64 first child, a row of its own tree; -1: none
    retrieve_next_sibling: Tensor  # [B, n] int64, likewise
    draft_token_num: int
    spec_steps: int  # no path has more edges: `max_tree_depth` - 1


@dataclass(frozen=True, eq=False)
class Committed:
    """What `DFlashWorkerV2._accept_block` returns, by its names, and what only trees need."""

    accept_len: Tensor  # [B] int32 draft tokens accepted
    commit_lens: Tensor  # [B] int32 one more: the bonus
    bonus: Tensor  # [B] int64
    out_tokens: Tensor  # [B, n] int64, the first `commit_lens` of each row; 0 past them
    new_seq_lens: Tensor  # [B] int64
    accept_index: Tensor  # [B, spec_steps + 1] int32 rows of the batch along the path; -1 past its end

    def to_front(self, rows: Tensor) -> Tensor:
        """`rows` [B·n, …] with those of each path at the front of its n rows, as if a chain had been verified; past the path the
        root's again."""
        batch, n = self.out_tokens.shape
        along = self.accept_index.long()
        first = torch.arange(0, batch * n, n, device=rows.device)[:, None]
        source = first.expand(batch, n).clone()
        source[:, : along.shape[1]] = torch.where(along < 0, first, along)
        return rows[source.flatten()]


def draft_tree(
    logprobs: Tensor, ids: Tensor, bonus_tokens: Tensor, seq_lens: Tensor, *, draft_token_num: int
) -> DraftTree:
    """The trees of a batch, in place of the argmax of each draft position.

    Args:
        logprobs: [B·L, K] float32, of the draft positions in the order of the worker's hidden states, as `topk_logprobs` gives
            them; with the lm_head split over ranks, as `topk_merge` does.
        ids: [B·L, K] int32.
        bonus_tokens, seq_lens: [B] int64, the roots and their positions: `draft_input.bonus_tokens` and `batch.seq_lens`.
        draft_token_num: rows of a tree, root included, 1 or more.

    Raises:
        ValueError: wrong shape, dtype or device.
    """
    batch = len(bonus_tokens)
    if draft_token_num < 1:
        raise ValueError(f"draft_token_num is {draft_token_num}; a tree has at least its root: pass 1 or more.")
    if logprobs.shape != ids.shape or logprobs.dim() != 2 or not batch or len(logprobs) % batch:
        raise ValueError(
            f"logprobs {tuple(logprobs.shape)} and ids {tuple(ids.shape)} must be [B·L, K] for {batch} sequences, 1 or more."
        )
    shape = batch, len(logprobs) // batch, logprobs.shape[1]
    most = draft_token_num - 1
    budget = torch.full((batch,), most, dtype=torch.int32, device=logprobs.device)
    root, position = bonus_tokens.int(), seq_lens.int()
    return tree_build(logprobs.view(shape), ids.view(shape), root, position, budget, max_budget=most)


def verify_tree(tree: DraftTree, seq_lens: Tensor, seq_lens_sum: int | None) -> VerifyTree:
    """`tree` as SGLang's tree verification takes it.

    Args:
        tree: of `draft_tree`.
        seq_lens: [B] int64, without the trees' rows.
        seq_lens_sum: their sum, which sizes a whole mask (`TreeMaskMode.FULL_MASK`); None makes the trees' own part
            (`QLEN_ONLY`).
    """
    batch, n = tree.tokens.shape
    device = tree.tokens.device
    own = torch.arange(n, device=device)
    words = tree.ancestors[:, :, own // WORD_BITS]  # [B, n, n]
    visible = ((words >> (own % WORD_BITS).int()) & 1).bool() | torch.eye(n, dtype=torch.bool, device=device)
    return VerifyTree(
        draft_token=tree.tokens.long().flatten(),
        custom_mask=visible.flatten() if seq_lens_sum is None else _whole_mask(visible, seq_lens, seq_lens_sum),
        positions=(seq_lens[:, None] + tree.depth).flatten(),
        retrieve_index=torch.arange(batch * n, device=device).view(batch, n),
        retrieve_next_token=tree.first_child.long(),
        retrieve_next_sibling=tree.next_sibling.long(),
        draft_token_num=n,
        spec_steps=tree.max_depth,
    )


def _whole_mask(visible: Tensor, seq_lens: Tensor, seq_lens_sum: int) -> Tensor:
    """Rows of seq_len + n keys each, one after the other: the prefix is visible to all."""
    batch, n, _ = visible.shape
    mask = torch.ones(n * (seq_lens_sum + batch * n), dtype=torch.bool, device=visible.device)
    own, keys = torch.arange(n, device=visible.device), seq_lens + n
    begin = n * (keys.cumsum(0) - keys)  # of each sequence
    rows = begin[:, None] + own * keys[:, None] + seq_lens[:, None]  # where the tree's part of each row begins
    mask[rows[:, :, None] + own] = visible
    return mask


def commit(tree: DraftTree, target_predict: Tensor, prefix_lens: Tensor) -> Committed:
    """The path of each tree that the target agrees with.

    Args:
        tree: of `draft_tree`.
        target_predict: [B, n] or [B·n] int64, the target's own token at each row: the argmax, or one draw.
        prefix_lens: [B] int64, as `seq_lens` was.
    """
    batch, n = tree.tokens.shape
    y = target_predict.view(batch, n)
    accepted = tree_accept(y.int(), tree)
    on_path = accepted.path >= 0
    nodes = accepted.path.clamp(min=0).long()
    out_tokens = y.new_zeros(batch, n)
    out_tokens[:, : nodes.shape[1]] = torch.where(on_path, y.gather(1, nodes), 0)
    first = torch.arange(0, batch * n, n, dtype=torch.int32, device=y.device)[:, None]
    return Committed(
        accept_len=accepted.n_accepted - 1,
        commit_lens=accepted.n_accepted,
        bonus=accepted.bonus.long(),
        out_tokens=out_tokens,
        new_seq_lens=prefix_lens + accepted.n_accepted,
        accept_index=torch.where(on_path, accepted.path + first, -1),
    )
