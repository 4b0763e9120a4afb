"""Generation over a harness, one token a step and by draft trees: two ways to the same tokens."""

from __future__ import annotations

from typing import Any

import torch

from ddtree.kernels import tree_accept, tree_build

from .conftest import I32, Harness, Piece, Sequence

DEPTHS, WIDTH, BUDGET = 4, 5, 11


def plain(h: Harness, prompt: list[int], count: int, **sampling: Any) -> list[int]:
    """`count` tokens after the prompt; `sampling` are fields of Piece."""
    sequence = h.sequence(len(prompt) + count)
    [output] = h.step(Piece(sequence, prompt, **sampling))
    tokens = output.y[-1:]
    while len(tokens) < count:
        [output] = h.step(Piece(sequence, tokens[-1:], **sampling))
        tokens += output.y
    h.release(sequence)
    return tokens


def speculative(
    h: Harness, prompt: list[int], count: int, guess: list[int], generator: torch.Generator, **sampling: Any
) -> tuple[list[int], int]:
    """The same by trees in which tokens of `guess` stand among others, and the rounds that it took."""
    sequence = h.sequence(len(prompt) + count + BUDGET + DEPTHS)
    [output] = h.step(Piece(sequence, prompt, **sampling))
    tokens, commit, rounds = output.y[-1:], None, 0
    while len(tokens) < count:
        tree = _tree(h, sequence, tokens[-1], guess[len(tokens) : len(tokens) + DEPTHS], generator, sampling)
        [output] = h.step(tree, commit=commit)
        accepted = tree_accept(torch.tensor([output.y], dtype=I32), tree.tree)
        commit = h.commit([tree], accepted)
        tokens += [output.y[node] for node in accepted.path[0, : int(accepted.n_accepted[0])].tolist()]
        rounds += 1
    h.release(sequence)
    return tokens[:count], rounds


def _tree(
    h: Harness, sequence: Sequence, root: int, guess: list[int], generator: torch.Generator, sampling: dict[str, Any]
) -> Piece:
    """Each depth has five random tokens, most have the guessed one among them."""
    ids = torch.stack(
        [torch.randperm(h.target.info.vocab_size, generator=generator)[:WIDTH] for _ in range(DEPTHS)]
    ).int()
    for depth, token in enumerate(guess):
        if token not in ids[depth] and torch.rand((), generator=generator) < 0.8:
            ids[depth, int(torch.randint(WIDTH, (), generator=generator))] = token
    logprobs = torch.randn(1, DEPTHS, WIDTH, generator=generator).log_softmax(-1).sort(descending=True).values
    tree = tree_build(
        logprobs,
        ids[None],
        torch.tensor([root], dtype=I32),
        torch.tensor([len(sequence.tokens)], dtype=I32),
        torch.tensor([BUDGET], dtype=I32),
        max_budget=BUDGET,
    )
    return Piece(sequence, tree.tokens[0].tolist(), tree, **sampling)
