"""Log-probabilities of a step's rows are the log-softmax of a whole forward, whatever shapes the draw, and nobody else pays."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from ddtree.verifier.batch import LogitEdits, LogprobRows, SamplingRows, TokenValues, VerifyBatch
from ddtree.verifier.logprobs import logprobs

from .conftest import Harness, Piece
from .test_hf import PROMPT, prompted

TOP = 4


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def asked(h: Harness, temperature: float, edits: LogitEdits | None = None) -> tuple[Piece, Piece, VerifyBatch]:
    """A tree and a prompt chunk. Tokens are drawn at the tree's rows and at the chunk's last; log-probabilities are wanted of
    some of the tree's rows and of the whole chunk."""
    tree = h.random_tree(prompted(h, PROMPT).sequence, 5, 12, torch.Generator().manual_seed(1))
    chunk = Piece(h.sequence(16), PROMPT[::-1])
    batch, nodes, n = h.batch(tree, chunk), len(tree.tokens), len(PROMPT)
    m = nodes + 1
    sampling = SamplingRows(
        int32(*range(nodes), nodes + n - 1), torch.full((m,), temperature), torch.full((m,), 0.9),
        torch.zeros(m, dtype=torch.int32), torch.arange(m),
    )  # fmt: skip
    rows = LogprobRows(
        int32(*range(1, nodes, 2), nodes), int32(*range(nodes, nodes + n - 1)), int32(*chunk.tokens[1:]), TOP
    )
    return tree, chunk, dataclasses.replace(batch, sampling=sampling, edits=edits, logprobs=rows)


def check(h: Harness, temperature: float, edits: LogitEdits | None = None) -> None:
    tree, chunk, batch = asked(h, temperature, edits)
    result = h.target.step(batch)
    silent = h.target.step(dataclasses.replace(batch, logprobs=None))
    assert silent.logprobs is None and torch.equal(silent.drawn, result.drawn), "a draw does not change with it"
    found, drawn, nodes = result.logprobs, result.drawn.tolist(), len(tree.tokens)
    assert found is not None and found.values.is_cpu
    contexts = [(PROMPT + tree.path(node), drawn[node]) for node in range(1, nodes, 2)]
    contexts += [(chunk.tokens, drawn[-1])]
    contexts += [(chunk.tokens[: i + 1], token) for i, token in enumerate(chunk.tokens[1:])]
    assert found.values.shape == found.ids.shape == (len(contexts), 1 + TOP)
    for i, (context, token) in enumerate(contexts):
        expected = h.oracle(context)[1].log_softmax(-1)
        torch.testing.assert_close(found.values[i], expected[found.ids[i].long()], atol=1e-4, rtol=0)
        torch.testing.assert_close(found.values[i, 1:], expected.topk(TOP).values, atol=1e-4, rtol=0)
        assert found.ids[i, 0] == token
        assert abs(int(found.rank[i]) - 1 - int((expected > expected[token]).sum())) <= 1
    h.release(tree.sequence, chunk.sequence)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_they_are_those_of_a_whole_forward(tiny: Harness, temperature: float) -> None:
    check(tiny, temperature)


def test_they_are_taken_block_by_block(tiny: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny.target._steps, "_block", 3)
    check(tiny, 0.0)


def test_edits_do_not_reach_them(tiny: Harness) -> None:
    none = TokenValues(int32(), int32(), torch.empty(0))
    bias = TokenValues(int32(0), int32(7), torch.tensor([50.0]))
    one = torch.ones(1)
    rows = int32(*range(13))
    edits = LogitEdits(rows, torch.zeros_like(rows), torch.zeros_like(rows), none, bias, none, one, 0 * one, 0 * one)
    check(tiny, 0.0, edits)
    *_, batch = asked(tiny, 0.0, edits)
    assert set(tiny.target.step(batch).drawn[:13].tolist()) == {7}, "they do reach the draw"


def test_every_row_wanted_and_greedy(tiny: Harness) -> None:
    """No `SamplingRows`: the rows are those of the batch."""
    piece = Piece(tiny.sequence(16), PROMPT)
    rows = LogprobRows(int32(2, 8), int32(), int32(), 0)
    batch = dataclasses.replace(tiny.batch(piece), sampling=None, logprobs=rows)
    result = tiny.target.step(batch)
    assert result.logprobs is not None and result.logprobs.ids[:, 0].tolist() == result.drawn[[2, 8]].tolist()
    for i, row in enumerate((2, 8)):
        expected = tiny.oracle(PROMPT[: row + 1])[1].log_softmax(-1)
        torch.testing.assert_close(result.logprobs.values[i], expected.amax(-1, keepdim=True), atol=1e-4, rtol=0)
    assert result.logprobs.rank.tolist() == [1, 1]
    tiny.release(piece.sequence)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_ranks_and_what_is_not_finite(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0], [0.0, torch.nan, 1.0, 1.0], [0.0, -torch.inf, 1.0, 2.0]]).to(dtype)
    found = logprobs(logits, int32(2, -1, -1), 9)
    expected = logits[0].float().log_softmax(-1)
    torch.testing.assert_close(found.values[0], expected[[2, 1, 2, 0, 3]])
    assert found.values[0, 0] == found.values[0, 2], "the same to the bit, wherever it stands"
    assert found.ids[0].tolist() == [2, 1, 2, 0, 3] and found.rank[0] == 1
    assert found.values[1:].isnan().all()
