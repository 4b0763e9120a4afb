"""The loss in chunks against autograd over all logits at once, and path heads that learn by it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ddtree.drafter.config import PATH_KINDS
from ddtree.drafter.training import losses
from ddtree.drafter.training.losses import grade
from ddtree.drafter.training.path_learner import PathLearner, new_head
from ddtree.drafter.training.rows import Blocks, Rows, sample_blocks

VOCAB, WIDTH, RANK, DECAY = 50, 12, 4, 5.0


def some_blocks() -> Blocks:
    """Of two rows of a document each, the first greedy; blocks at the end run past it."""
    token = torch.randint(VOCAB, (2, 40), dtype=torch.int32)
    start, end = torch.zeros_like(token), torch.full_like(token, 40)
    anchor = (torch.arange(40) > 20).expand(2, -1) & (torch.arange(40) < 39)
    return sample_blocks(Rows(token, start, end, anchor, torch.tensor([[True], [False]]).expand(2, 40)), 16, 4)


def expected(blocks: Blocks, logits: Tensor, teacher: Tensor, lm_head: Tensor) -> Tensor:
    """Mean cross-entropy by the slots' weights."""
    rows = torch.arange(2)[:, None, None]
    taught = (teacher @ lm_head.T).softmax(-1)[rows, blocks.at[:, :, :-1]]
    hard = F.one_hot(blocks.token[:, :, 1:], VOCAB).float()
    wanted = torch.where(blocks.greedy[:, :, None, None], hard, taught)
    weight = torch.exp(-torch.arange(3) / DECAY) * blocks.wanted[:, :, 1:]
    return -((wanted * logits.log_softmax(-1)).sum(-1) * weight).sum() / weight.sum()


@pytest.mark.parametrize("share", [None, 0.3, 1.0])
@pytest.mark.parametrize("chunk", [7, 1000])
def test_gradients_are_autograds(share: float | None, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(losses, "LOGIT_CELLS", chunk * VOCAB)
    blocks = some_blocks()
    drafted, teacher = torch.randn(2, 16, 3, WIDTH, requires_grad=True), torch.randn(2, 40, WIDTH)
    lm_head = torch.randn(VOCAB, WIDTH)
    before, itself = (torch.randn(shape, requires_grad=True) for shape in ((2, 16, 3, RANK), (VOCAB, RANK)))
    logits = drafted @ lm_head.T
    own, after = (expected(blocks, x, teacher, lm_head) for x in (logits, logits + before @ itself.T))
    (own if share is None else (1 - share) * own + share * after).backward()
    path = None if share is None else (before, itself)
    got = grade(blocks, drafted, teacher, lm_head, DECAY, path, share or 0.0)
    torch.testing.assert_close(got.of_drafted, drafted.grad)
    for term, loss, x in ((got.own, own, logits), (got.path, after, logits + before @ itself.T)):
        if term:
            torch.testing.assert_close(term.loss, loss)
            right = (x.argmax(-1) == blocks.token[:, :, 1:]) & blocks.wanted[:, :, 1:]
            assert torch.equal(term.hits.bool(), right)
    assert (got.own is None, got.path is None) == (share == 1.0, share is None)
    if share is None:
        assert got.of_before is got.of_itself is None
    else:
        torch.testing.assert_close(got.of_before, before.grad)
        torch.testing.assert_close(got.of_itself, itself.grad)


def test_a_frozen_drafter_gets_no_gradient() -> None:
    factors = torch.randn(2, 16, 3, RANK), torch.randn(VOCAB, RANK)
    got = grade(
        some_blocks(),
        torch.randn(2, 16, 3, WIDTH),
        torch.randn(2, 40, WIDTH),
        torch.randn(VOCAB, WIDTH),
        DECAY,
        factors,
    )
    assert got.of_drafted is None and got.own is None and got.of_before is not None


@pytest.mark.parametrize("kind", PATH_KINDS)
def test_every_kind_begins_with_nothing_and_learns_what_follows_what(kind: str) -> None:
    """Every token is followed by the next one, which hidden states say nothing of: they are nearly the same everywhere."""
    torch.manual_seed(0)
    usual = torch.randn(WIDTH)
    embedding = torch.randn(VOCAB, WIDTH)
    learner = PathLearner(new_head(kind, embedding, WIDTH, seed=0), embedding, rate=10.0)
    assert learner.head.kind == kind
    seen: list[float] = []
    for _ in range(60):
        blocks = some_blocks()
        blocks.token.copy_((blocks.token[:, :, :1] + torch.arange(4)) % VOCAB)
        blocks.greedy.fill_(True)
        drafted = usual + 0.1 * torch.randn(2, 16, 3, WIDTH)
        factors = learner.factors(blocks, drafted)
        got = grade(blocks, drafted, torch.randn(2, 40, WIDTH), embedding, DECAY, factors)
        if not seen:
            alone = grade(blocks, drafted, torch.randn(2, 40, WIDTH), embedding, DECAY)
            assert got.path is not None and alone.own is not None
            torch.testing.assert_close(got.path.loss, alone.own.loss)
        assert got.of_before is not None and got.path is not None
        factors[0].backward(got.of_before)
        learner.step(got, 1.0)
        seen.append(float(got.path.loss))
    assert seen[-1] < 0.7 * seen[0]
    again = PathLearner(new_head(kind, embedding, WIDTH, seed=1), embedding)
    again.restore(learner.state())
    assert all(torch.equal(tensor, learner.tensors[name]) for name, tensor in again.tensors.items())


def test_a_rank_above_the_embeddings_is_refused() -> None:
    with pytest.raises(ValueError, match="give a smaller path_rank"):
        new_head("vanilla", torch.randn(VOCAB, WIDTH), WIDTH + 1, 0)
