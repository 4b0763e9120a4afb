"""Our structures against what SGLang's own kernels make of the same trees, and through its own walk, in Triton's interpreter.

Run by test_sglang.py in a process whose Triton interprets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree.kernels import DraftTree
from ddtree.kernels.integrations.sglang import commit, draft_tree, verify_tree

from ..strategies import candidates, kinds, seeds, token_ids
from . import sglang_release

SPEC_TREE = "kernels/ops/speculative/spec_tree.py"
DFLASH = "kernels/ops/speculative/dflash.py"


def kernel(name: str):
    return sglang_release.run(SPEC_TREE, name, triton=triton, tl=tl)


@pytest.fixture(scope="module")
def build():
    return kernel("sgl_build_tree_kernel_efficient_triton")


@pytest.fixture(scope="module")
def walk():
    return kernel("verify_tree_greedy_kernel_triton")


def drawn(rng: np.random.Generator, batch: int, levels: int, width: int, n: int, kind: str) -> tuple[DraftTree, Tensor]:
    """Trees made from what the worker has, and their sequences' lengths."""
    logprobs = np.concatenate([candidates(rng, levels, width, kind) for _ in range(batch)])
    ids = np.concatenate([token_ids(rng, levels, width) for _ in range(batch)])
    bonus = torch.from_numpy(rng.integers(0, 9, batch))
    seq_lens = torch.from_numpy(rng.integers(1, 12, batch))
    made = draft_tree(torch.from_numpy(logprobs), torch.from_numpy(ids), bonus, seq_lens, draft_token_num=n)
    return made, seq_lens


def as_eagle(tree: DraftTree) -> tuple[Tensor, Tensor, int]:
    """parent_list, top_scores_index and topk under which EAGLE's builder makes the same tree: node i is child number `rank` of
    node `parent`, parents go by their node number, and what a parent list holds of a node is the node's own index."""
    batch, n = tree.tokens.shape
    selected = torch.zeros(batch, n - 1, dtype=torch.long)
    for b in range(batch):
        children = [0] * n
        for node in range(1, n):
            parent = int(tree.parent[b, node])
            selected[b, node - 1] = parent * n + children[parent]
            children[parent] += 1
    return torch.cat([torch.full((batch, 1), -1), selected], 1), selected, n


def theirs(build, tree: DraftTree, seq_lens: Tensor, whole: bool) -> dict[str, Tensor]:
    batch, n = tree.tokens.shape
    parents, selected, topk = as_eagle(tree)
    total = n * (int(seq_lens.sum()) + batch * n) if whole else batch * n * n
    found = {
        "custom_mask": torch.ones(total, dtype=torch.bool),
        "positions": torch.empty(batch * n, dtype=torch.long),
        **{f"retrieve_{name}": torch.full((batch, n), -1) for name in ("index", "next_token", "next_sibling")},
    }
    build[(batch,)](
        parents, selected, seq_lens, seq_lens.cumsum(0) - seq_lens, *found.values(), topk=topk, depth=n, draft_token_num=n,
        tree_mask_mode=0 if whole else 1, batch_size=batch, parent_list_stride=n, selected_index_stride=n - 1,
    )  # fmt: skip
    return found


@given(seeds, st.integers(1, 3), st.integers(1, 4), st.integers(3, 5), st.sampled_from(["peaky", "flat", "equal"]))
@settings(max_examples=40)
@pytest.mark.parametrize("whole", [True, False])
def test_structures_are_those_of_their_builder(build, whole, rng, batch, levels, width, kind):
    n = int(rng.integers(2, min(8, 2 + levels * width)))
    tree, seq_lens = drawn(rng, batch, levels, width, n, kind)
    assert (tree.n_nodes == n).all()  # their builder knows no padding
    ours = verify_tree(tree, seq_lens, int(seq_lens.sum()) if whole else None)
    for name, expected in theirs(build, tree, seq_lens, whole).items():
        found = getattr(ours, name)
        assert found.dtype == expected.dtype and torch.equal(found, expected), name


@given(seeds, st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(2, 9), kinds)
@settings(max_examples=100)
def test_their_walk_finds_our_path(walk, rng, batch, levels, width, n, kind):
    tree, seq_lens = drawn(rng, batch, levels, width, n, kind)
    ours = verify_tree(tree, seq_lens, None)
    y = lucky(rng, tree)
    predict = torch.zeros(batch * n, dtype=torch.int32)
    accept_index = torch.full((batch, ours.spec_steps + 1), -1, dtype=torch.int32)
    accepted = torch.empty(batch, dtype=torch.int32)
    links = ours.retrieve_index, ours.retrieve_next_token, ours.retrieve_next_sibling
    walk[(batch,)](
        predict, accept_index, accepted, ours.draft_token, *links, y,
        batch_size=batch, num_speculative_tokens=ours.spec_steps + 1, num_draft_tokens=n,
    )  # fmt: skip
    done = commit(tree, y, seq_lens)
    assert done.accept_index.dtype == torch.int32 and torch.equal(done.accept_index, accept_index)
    assert done.accept_len.dtype == torch.int32 and torch.equal(done.accept_len, accepted)
    for b, length in enumerate((accepted + 1).tolist()):
        path = accept_index[b, :length].long()
        assert done.out_tokens[b, :length].tolist() == predict[path].tolist()


@given(seeds, st.integers(1, 4), st.integers(1, 9))
@settings(max_examples=40)
def test_chains_are_accepted_as_their_worker_does(rng, batch, n):
    accept = sglang_release.run(DFLASH, "compute_dflash_correct_drafts_and_bonus", torch=torch)
    tree, seq_lens = drawn(rng, batch, n, 1, n, "zero")  # one candidate a depth: a chain
    y = lucky(rng, tree)
    done = commit(tree, y, seq_lens)
    if n > 1:
        expected = accept(candidates=tree.tokens.long(), target_predict=y)
        assert all(map(torch.equal, (done.accept_len, done.bonus), expected))
    out, lengths = sglang_release.run("srt/speculative/dflash_worker_v2.py", "_commit_accept", torch=torch)(
        tree.tokens.long(), done.accept_len, done.bonus
    )
    assert torch.equal(done.commit_lens, lengths) and torch.equal(done.new_seq_lens, seq_lens + lengths)
    for row, expected_row, length in zip(done.out_tokens, out, lengths, strict=True):
        assert torch.equal(row[:length], expected_row[:length])


def lucky(rng: np.random.Generator, tree: DraftTree) -> Tensor:
    """[B, n] int64: the target's tokens, often that of some child."""
    y = torch.from_numpy(rng.integers(0, 6, tree.tokens.shape))
    for b, parents in enumerate(tree.parent.tolist()):
        for node, parent in enumerate(parents):
            if parent >= 0 and rng.random() < 0.7:
                y[b, parent] = tree.tokens[b, node]
    return y
