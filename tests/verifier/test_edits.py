"""Edited logits against their definition in plain Python, over random trees, histories and parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.verifier.batch import LogitEdits, TokenValues
from ddtree.verifier.edits import BANNED, edit

VOCABULARY = 7
ids = st.integers(0, VOCABULARY - 1)


@dataclass(frozen=True)
class Case:
    """One sequence with its tree."""

    prompt: list[int]
    answer: list[int]  # the root is its last token
    tree: list[tuple[int, int]]  # (parent, token) of nodes 1 …, parents first
    bias: dict[int, float] = field(default_factory=dict)
    stop: set[int] = field(default_factory=set)
    min_tokens: int = 0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0

    def path(self, node: int) -> list[int]:
        """Nodes below the root."""
        return [] if node == 0 else [*self.path(self.tree[node - 1][0]), node]

    def expected(self, logits: list[float], node: int) -> list[float]:
        answer = self.answer + [self.tree[i - 1][1] for i in self.path(node)]
        out = []
        for token, x in enumerate(logits):
            x += self.bias.get(token, 0.0)
            if token in self.prompt + answer:
                x = x / self.repetition if x > 0 else x * self.repetition
            x -= self.frequency * answer.count(token) + self.presence * (token in answer)
            out.append(BANNED if token in self.stop and len(answer) < self.min_tokens else x)
        return out


@st.composite
def cases(draw: st.DrawFn) -> Case:
    nodes = draw(st.integers(0, 40))  # more than a word of ancestor bits has room for
    return Case(
        draw(st.lists(ids, min_size=1, max_size=6)),
        draw(st.lists(ids, min_size=1, max_size=6)),
        [(draw(st.integers(0, i)), draw(ids)) for i in range(nodes)],
        draw(st.dictionaries(ids, st.floats(-5, 5, width=32))),
        draw(st.sets(ids, max_size=3)),
        draw(st.integers(0, 10)),
        draw(st.sampled_from([1.0, 0.5, 1.5])),
        draw(st.sampled_from([0.0, -2.0, 0.25])),
        draw(st.sampled_from([0.0, -1.0, 1.5])),
    )


def values(each: list[dict[int, float]]) -> TokenValues:
    flat = [(i, token, value) for i, found in enumerate(each) for token, value in found.items()]
    sequence, token, value = zip(*flat, strict=True) if flat else ((), (), ())
    return TokenValues(torch.tensor(sequence).int(), torch.tensor(token).int(), torch.tensor(value).float())


@given(st.lists(cases(), min_size=1, max_size=3), st.integers(0, 99))
@settings(deadline=None, max_examples=150)
def test_edits_are_their_definition(given: list[Case], seed: int) -> None:
    """Rows of sequences without edits lie between."""
    words = max(-(-(len(case.tree) + 1) // 32) for case in given)
    tokens: list[int] = [3, 3]
    ancestors, positions, rows, roots, owners = [[0] * words] * 2, [0, 0], [], [], []
    for i, case in enumerate(given):
        root = len(tokens)
        for node, token in enumerate([case.answer[-1], *(token for _, token in case.tree)]):
            path = [0, *case.path(node)]
            bits = sum(1 << at for at in path)
            words_of = [bits >> 32 * w & 0xFFFFFFFF for w in range(words)]
            ancestors.append([word - (word >> 31 << 32) for word in words_of])
            positions.append(len(case.prompt) + len(case.answer) + len(path) - 1)
            rows.append(len(tokens))
            roots.append(root)
            owners.append(i)
            tokens.append(token)
    edits = LogitEdits(
        row=torch.tensor(rows).int(),
        sequence=torch.tensor(owners).int(),
        root=torch.tensor(roots).int(),
        history=values([{t: c.answer.count(t) for t in c.prompt + c.answer} for c in given]),
        bias=values([case.bias for case in given]),
        banned=values([dict.fromkeys(c.stop, len(c.prompt) + c.min_tokens) for c in given]),
        repetition=torch.tensor([case.repetition for case in given]),
        frequency=torch.tensor([case.frequency for case in given]),
        presence=torch.tensor([case.presence for case in given]),
    )
    logits = torch.randn(len(tokens), VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 3
    before = logits.clone()
    numbers = torch.tensor(positions), torch.tensor(tokens).int(), torch.tensor(ancestors).int()
    got = edit(logits, *numbers, edits)
    assert torch.equal(got[:2], before[:2])
    for row, owner, root in zip(rows, owners, roots, strict=True):
        expected = given[owner].expected(before[row].tolist(), row - root)
        torch.testing.assert_close(got[row], torch.tensor(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(value: float) -> None:
    case = Case([1], [2], [], bias={2: -100.0}, stop={3}, min_tokens=5, repetition=2.0, frequency=2.0)
    one = torch.zeros(1, dtype=torch.int32)
    edits = LogitEdits(
        one, one, one, values([{1: 0, 2: 1}]), values([case.bias]), values([{3: 6}]),
        torch.tensor([2.0]), torch.tensor([2.0]), torch.tensor([0.0]),
    )  # fmt: skip
    for token in range(VOCABULARY):
        logits = torch.zeros(1, VOCABULARY)
        logits[0, token] = value
        assert not torch.isfinite(edit(logits, torch.tensor([2]), one, one[None], edits)).all()
