"""At temperature 1 answers come as often as the target says, drafts or not: every answer of three tokens that a tiny target can
give is counted against its exact probability (chi-square)."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from .tiny import VOCABULARY, Engine, Guesser, LocalVerifier, make_target, plain, request

PROMPT = [3, 14, 15, 9, 26]
BUDGET = 7
LENGTH = 3  # the first token comes from the prompt's row, the second from a root, the third often from a drafted node
SAMPLES = 4000
EXPECTED = 5  # answers that are expected less often share a bin


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@torch.inference_mode()
def probabilities(target_dir: Path) -> Tensor:
    """[V, V, V] float64: of every answer, by transformers alone."""
    model = LlamaForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    prefixes = torch.tensor([[*PROMPT, *pair] for pair in product(range(VOCABULARY), repeat=LENGTH - 1)])
    rows = model(prefixes).logits[:, -LENGTH:].double().softmax(-1)
    pairs = rows.view(VOCABULARY, VOCABULARY, LENGTH, VOCABULARY)
    first, second, third = pairs[0, 0, 0], pairs[:, 0, 1], pairs[:, :, 2]
    return first[:, None, None] * second[:, :, None] * third


def test_answers_come_as_often_as_the_target_says(target_dir: Path) -> None:
    verifier = LocalVerifier(target_dir)
    likely = [*PROMPT, *plain(verifier, request("likely", PROMPT, LENGTH, 0))]
    engine = Engine(verifier)
    engine.loop.add_drafter(Guesser("d", defaultdict(lambda: likely), seed=0, errs=0))
    names = [f"answer {i}" for i in range(SAMPLES)]  # a name's hash is its seed
    for begin in range(0, SAMPLES, 50):
        for name in names[begin : begin + 50]:
            engine.add(request(name, PROMPT, LENGTH, BUDGET, temperature=1.0))
        engine.run()
    counted = Counter(tuple(engine.output[name]) for name in names)
    assert engine.loop.totals.accepted_tokens > SAMPLES / 10, "drafts were accepted"

    expected = probabilities(target_dir).flatten() * SAMPLES
    seen = torch.zeros_like(expected)
    for (a, b, c), times in counted.items():
        seen[(a * VOCABULARY + b) * VOCABULARY + c] = times
    often = expected >= EXPECTED
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    seen = torch.cat([seen[often], seen[~often].sum()[None]])
    assert often.sum() > 80 and abs(float(expected.sum()) - SAMPLES) < 1e-3
    statistic = ((seen - expected) ** 2 / expected).sum()
    p = torch.special.gammaincc(torch.tensor(len(seen) - 1).double() / 2, statistic / 2)
    print(f"{len(seen)} bins, chi-square {statistic:.1f}, p {p:.3f}")
    assert p > 0.001
