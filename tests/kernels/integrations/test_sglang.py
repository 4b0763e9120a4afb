"""The SGLang adapter: against its release's own code, and in rounds against plain decoding."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddtree.kernels import topk_logprobs
from ddtree.kernels.integrations.sglang import RELEASE, Committed, VerifyTree, commit, draft_tree, verify_tree

from ..devices import on_devices
from ..strategies import seeds
from . import sglang_release
from .sources import HOOK, check

DOCUMENT = Path(__file__).parents[3] / "docs/sglang_integration.md"
HOOKS = HOOK.findall(DOCUMENT.read_text(encoding="utf-8"))
CHECKS = Path(__file__).with_name("sglang_checks.py")
VOCABULARY, BLOCK, WIDTH = 13, 5, 4


def test_the_release_is_the_one_that_is_documented() -> None:
    assert sglang_release.installed() == RELEASE
    assert f"sglang=={RELEASE}" in DOCUMENT.read_text(encoding="utf-8")
    assert len(HOOKS) > 20


@pytest.mark.parametrize(("file", "name", "arguments"), HOOKS, ids=lambda text: text.split("/")[-1] or "-")
def test_every_hook_is_where_the_document_says(file: str, name: str, arguments: str) -> None:
    check(sglang_release.root(), file, name, arguments)


def test_a_hook_that_moved_is_found_out() -> None:
    with pytest.raises(LookupError, match="no DFlashWorkerV2"):
        sglang_release.definition("srt/speculative/dflash_worker_v2.py", "DFlashWorkerV2._gone")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed; the test extra has it")
def test_agrees_with_their_own_kernels() -> None:
    sglang_release.root()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def target(seen: list[int]) -> int:
    """What follows these tokens: any of them matters, and so does their order."""
    return hash(tuple(seen)) % VOCABULARY


def plain(prompt: list[int], tokens: int) -> list[int]:
    whole = list(prompt)
    for _ in range(tokens):
        whole.append(target(whole))
    return whole[len(prompt) :]


def verified(tree: VerifyTree, contexts: list[list[int]], whole: bool) -> Tensor:
    """[B·n] int64: a target that reads the keys which the mask shows to each row, those before it in position order."""
    n, begin, drawn = tree.draft_token_num, 0, []
    for b, context in enumerate(contexts):
        rows = slice(b * n, (b + 1) * n)
        keys = torch.tensor(context + tree.draft_token[rows].tolist())
        positions = torch.cat([torch.arange(len(context)), tree.positions[rows].cpu()])
        width = len(keys) if whole else n
        mask = tree.custom_mask[begin : begin + n * width].view(n, width).cpu()
        begin += n * width
        for row in mask:
            seen = row if whole else torch.cat([torch.ones(len(context), dtype=torch.bool), row])
            assert sorted(positions[seen].tolist()) == list(range(int(seen.sum()))) or not seen[len(context)]
            order = positions[seen].argsort()
            drawn.append(target(keys[seen][order].tolist()))
    assert begin == len(tree.custom_mask)
    return torch.tensor(drawn)


def drafts(rng: np.random.Generator, contexts: list[list[int]], bonus: list[int]) -> Tensor:
    """[B·L, V] logits of a drafter that is right more often than not, of draft positions as the worker has them."""
    rows = []
    for context, root in zip(contexts, bonus, strict=True):
        truth = plain([*context, root], BLOCK - 1)
        logits = rng.normal(size=(BLOCK - 1, VOCABULARY)).astype(np.float32)
        logits[np.arange(BLOCK - 1), truth] += 2
        rows.append(logits)
    return torch.from_numpy(np.concatenate(rows))


@on_devices
@given(seeds, st.integers(1, 3), st.integers(1, 12), st.integers(1, WIDTH), st.booleans())
@settings(max_examples=20, deadline=None)
def test_rounds_commit_what_plain_decoding_gives(device, rng, batch, n, width, whole):
    prompts = [rng.integers(0, VOCABULARY, rng.integers(1, 6)).tolist() for _ in range(batch)]
    contexts = [list(prompt) for prompt in prompts]  # tokens whose KV rows are there
    bonus = [target(prompt) for prompt in prompts]
    committed = [[token] for token in bonus]
    for _ in range(3):
        logprobs, ids = topk_logprobs(drafts(rng, contexts, bonus).to(device), width)
        seq_lens = torch.tensor([len(context) for context in contexts], device=device)
        tree = draft_tree(logprobs, ids, torch.tensor(bonus, device=device), seq_lens, draft_token_num=n)
        laid = verify_tree(tree, seq_lens, int(seq_lens.sum()) if whole else None)
        done = commit(tree, verified(laid, contexts, whole).to(device), seq_lens)
        in_front = done.to_front(laid.draft_token).view(batch, n)
        for b, length in enumerate(done.commit_lens.tolist()):
            contexts[b] += in_front[b, :length].tolist()  # the rows that the path's tokens wrote
            committed[b] += done.out_tokens[b, :length].tolist()
        bonus = done.bonus.tolist()
        assert [len(context) for context in contexts] == done.new_seq_lens.tolist()
        check_types(laid, done, batch, n)
    for prompt, tokens in zip(prompts, committed, strict=True):
        assert tokens == plain(prompt, len(tokens))


def check_types(laid: VerifyTree, done: Committed, batch: int, n: int) -> None:
    """Of `EagleVerifyInput.create_idle_input`, `build_tree_kernel_efficient` and `DFlashWorkerV2._accept_block`."""
    for name in ("draft_token", "positions"):
        assert (getattr(laid, name).dtype, getattr(laid, name).shape) == (torch.int64, (batch * n,))
    for name in ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling"):
        assert (getattr(laid, name).dtype, getattr(laid, name).shape) == (torch.int64, (batch, n))
    assert laid.custom_mask.dtype == torch.bool
    assert (done.out_tokens.dtype, done.out_tokens.shape) == (torch.int64, (batch, n))
    assert {done.accept_len.dtype, done.commit_lens.dtype, done.accept_index.dtype} == {torch.int32}
    assert {done.bonus.dtype, done.new_seq_lens.dtype} == {torch.int64}


def test_bad_input_is_refused() -> None:
    one, logprobs, ids = torch.ones(1, dtype=torch.long), torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="draft_token_num is 0"):
        draft_tree(logprobs, ids, one, one, draft_token_num=0)
    with pytest.raises(ValueError, match="for 2 sequences"):
        draft_tree(logprobs, ids, one.repeat(2), one.repeat(2), draft_token_num=4)
    with pytest.raises(ValueError, match="ids"):
        draft_tree(logprobs, ids[:2], one, one, draft_token_num=4)
