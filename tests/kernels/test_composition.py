"""One round of draft-tree operations, each fed by the one before: alone, and as one CUDA graph where there is a GPU.

The stand-in for the target is a table of next tokens, so the round must commit the longest run of that table's chain that
the tree holds, and the cache must end with the rows of exactly those tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from ddtree.kernels import (
    AcceptedPath,
    DraftTree,
    Rows,
    kv_compact,
    topk_logprobs,
    tree_accept,
    tree_build,
    verify_attn,
)

from .devices import on_devices

BATCH, LEVELS, VOCAB, K, BUDGET, PAGE, LAYERS, HEADS, DIM = 3, 5, 97, 8, 40, 16, 2, 4, 64


@dataclass(frozen=True)
class Inputs:
    logits: Tensor  # [B * L, V]
    root: Tensor  # [B]
    seq_len: Tensor  # [B]
    budget: Tensor  # [B]
    page_table: Tensor  # [B, P]
    next_token: Tensor  # [V] the stand-in's answer to each token
    caches: Tensor  # [layers, pages, page_size, 1, D] bfloat16; column 0 of a row names its token
    q: Tensor  # [B * (N + 1), H, D]

    def on(self, device: str) -> Inputs:
        return Inputs(*(getattr(self, f.name).to(device, copy=True) for f in fields(self)))


@dataclass(frozen=True)
class Outputs:
    logprobs: Tensor  # [B * L, K]
    ids: Tensor
    tree: DraftTree
    accepted: AcceptedPath
    out: Tensor
    lse: Tensor


def make(seed: int) -> Inputs:
    random = torch.Generator().manual_seed(seed)
    pages = BATCH * 8
    next_token = torch.randperm(VOCAB, generator=random).int()
    root = torch.randint(0, VOCAB, (BATCH,), generator=random).int()
    logits = torch.randn(BATCH, LEVELS, VOCAB, generator=random)
    for b in range(BATCH):
        token = root[b]
        for level in range(LEVELS):  # the drafter has an idea of what the target says
            token = next_token[token]
            logits[b, level, token] += 2.5
    return Inputs(
        logits=logits.flatten(0, 1),
        root=root,
        seq_len=torch.randint(0, 60, (BATCH,), generator=random).int(),
        budget=torch.randint(0, BUDGET + 1, (BATCH,), generator=random).int(),
        page_table=torch.randperm(pages, generator=random).int().view(BATCH, -1),
        next_token=next_token,
        caches=torch.randn(LAYERS, pages, PAGE, 1, DIM, generator=random).bfloat16(),
        q=torch.randn(BATCH * (BUDGET + 1), HEADS, DIM, generator=random).bfloat16(),
    )


def slots(inputs: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Pages and slots of rows [B, n], counted from each sequence's start."""
    return inputs.page_table.gather(1, (rows // PAGE).long()).long(), (rows % PAGE).long()


def run(inputs: Inputs, found: tuple[Tensor, Tensor] | None = None) -> Outputs:
    """The round, from these candidates if any were `found` already. It reads no value on the host, so it can be captured."""
    logprobs, ids = found or topk_logprobs(inputs.logits, K)
    candidates = (x.view(BATCH, LEVELS, K) for x in (logprobs, ids))
    tree = tree_build(*candidates, inputs.root, inputs.seq_len, inputs.budget, max_budget=BUDGET)
    node = torch.arange(BUDGET + 1, dtype=torch.int32, device=inputs.root.device)
    written = inputs.caches[:, *slots(inputs, inputs.seq_len[:, None] + node)]
    written[..., 0] = tree.tokens[..., None].bfloat16()
    inputs.caches[:, *slots(inputs, inputs.seq_len[:, None] + node)] = written
    rows = Rows(
        row_offsets=torch.arange(BATCH + 1, dtype=torch.int32, device=node.device) * (BUDGET + 1),
        q_len=tree.n_nodes,
        seq_len=inputs.seq_len,
        page_table=inputs.page_table,
        page_size=PAGE,
        causal=torch.zeros(BATCH, dtype=torch.bool, device=node.device),
        ancestors=tree.ancestors.flatten(0, 1),
    )
    out, lse = verify_attn(inputs.q, inputs.caches[0], inputs.caches[1], rows, scale=0.125)
    accepted = tree_accept(inputs.next_token[tree.tokens.long()], tree)
    kv_compact([inputs.caches], inputs.page_table, PAGE, inputs.seq_len, accepted.path, accepted.n_accepted)
    return Outputs(logprobs, ids, tree, accepted, out, lse)


def check(inputs: Inputs, outputs: Outputs) -> None:
    """What is committed is the stand-in's own chain, as far as the tree holds it, and so says the cache."""
    for b in range(BATCH):
        parent, carried, bonus = outputs.tree.parent[b], outputs.tree.tokens[b], int(inputs.next_token[inputs.root[b]])
        node, tokens = 0, [int(inputs.root[b])]
        while len(found := ((parent == node) & (carried == bonus)).nonzero()):
            node = int(found)
            tokens.append(bonus)
            bonus = int(inputs.next_token[bonus])
        assert int(outputs.accepted.n_accepted[b]) == len(tokens)
        assert int(outputs.accepted.bonus[b]) == bonus
        for i, token in enumerate(tokens):
            page, slot = divmod(int(inputs.seq_len[b]) + i, PAGE)
            assert inputs.caches[:, inputs.page_table[b, page], slot, 0, 0].eq(token).all()


def equal(actual: Outputs, inputs: Inputs) -> None:
    """As the reference has it: the candidates up to rounding (a sum over the vocabulary), what follows from them to the bit."""
    logprobs, ids = topk_logprobs(inputs.logits, K)
    assert torch.equal(actual.ids.cpu(), ids)
    torch.testing.assert_close(actual.logprobs.cpu(), logprobs, atol=2e-5, rtol=2e-6)
    expected = run(inputs, (actual.logprobs.cpu(), ids))
    for part in ("tree", "accepted"):
        a, e = getattr(actual, part), getattr(expected, part)
        for f in fields(a):
            if isinstance(getattr(a, f.name), Tensor):
                assert torch.equal(getattr(a, f.name).cpu(), getattr(e, f.name)), f.name
    torch.testing.assert_close(actual.out.cpu(), expected.out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(actual.lse.cpu(), expected.lse, atol=1e-3, rtol=1e-3)


@on_devices
@pytest.mark.parametrize("seed", range(8))
def test_a_round_commits_the_targets_own_chain(seed, device):
    inputs = make(seed).on(device)
    outputs = run(inputs)
    check(inputs, outputs)
    equal(outputs, make(seed))


def test_some_round_accepts_more_than_the_root():
    assert max(int(run(make(seed)).accepted.n_accepted.max()) for seed in range(8)) >= 3


if torch.cuda.is_available():

    def test_one_graph_replays_with_changed_inputs():
        static = make(0).on("cuda")
        warm = torch.cuda.Stream()  # capture wants kernels loaded and workspaces known
        with torch.cuda.stream(warm):
            run(replace(static, caches=static.caches.clone()))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # a host read or an allocation outside the graph's pool would end it
            outputs = run(static)
        for seed in (3, 5, 7, 3):
            fresh = make(seed)
            for f in fields(fresh):
                getattr(static, f.name).copy_(getattr(fresh, f.name))
            graph.replay()
            torch.cuda.synchronize()
            check(static.on("cpu"), outputs)
            equal(outputs, fresh)
