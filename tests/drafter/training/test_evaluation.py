"""A drafter measured from its directory and texts alone: what is counted, left out, said on the way and drawn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddtree.drafter.checkpoint import save_published
from ddtree.drafter.config import DrafterConfig, Rope
from ddtree.drafter.dflash import DFlashModel
from ddtree.drafter.training import evaluation
from ddtree.drafter.training.chat import ChatFormat, encode, load_tokenizer
from ddtree.drafter.training.evaluation import EvaluationOptions, evaluate
from ddtree.drafter.training.trainer import initialise

SETS = {"tea": ["Tell me of tea.", "And of coffee?", "the quick brown fox " * 40], "nuts": ["How many nuts?"]}


@pytest.fixture(scope="module")
def options(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> EvaluationOptions:
    config = DrafterConfig(
        hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=400,
        num_target_layers=6, target_layer_ids=(1, 3), block_size=8, mask_token_id=4, max_positions=256, rope=Rope(theta=1e4),
    )  # fmt: skip
    model = DFlashModel(config)
    initialise(model, torch.ones(32), 0)
    folder = tmp_path_factory.mktemp("drafter")
    save_published(model, folder, dtype=torch.float32)
    return EvaluationOptions(target_dir=target_dir, drafter_dir=folder, budgets=(4, 8), tokens=16, context=128)


def test_sets_are_counted_and_long_prompts_left_out(options: EvaluationOptions) -> None:
    said: list[tuple[str, float]] = []
    found = evaluate(options, SETS, lambda stage, done, line: said.append((stage, done)))
    assert {name: (s.prompts, s.left_out) for name, s in found.sets.items()} == {"tea": (2, 1), "nuts": (1, 0)}
    assert (found.overall.prompts, found.overall.left_out) == (3, 1)
    for name, tally in found.overall.columns.items():
        assert tally.rounds == sum(s.columns[name].rounds for s in found.sets.values())
    for stage in ("answers", "rounds"):
        done = [fraction for named, fraction in said if named == stage]
        assert done == sorted(done) and done[-1] == 1.0
    assert len([1 for named, _ in said if named == "answers"]) > 3, "it is told before the answers are finished"


def test_other_prompts_come_before_each(options: EvaluationOptions) -> None:
    """In the user's text; what does not fit with them is left out."""
    tokenizer = load_tokenizer(options.target_dir)
    chat = ChatFormat.of(tokenizer)
    late = replace(options, preceding=40)
    jobs, names = evaluation._jobs(late, {"tea": SETS["tea"][:2], "nuts": SETS["nuts"]}, tokenizer)
    assert names == ["tea", "tea", "nuts"]
    opening, assistant = (tokenizer.decode(ids) for ids in encode(tokenizer, [chat.opening, chat.assistant]))
    for job, own, other in zip(jobs, ["tea.", "coffee?", "nuts?"], ["coffee?", "of tea.", "nuts?"], strict=True):
        text = tokenizer.decode(job.prompt)
        assert text.startswith(opening) and text.endswith(own + assistant) and text.count(other) >= 2
        plain = encode(tokenizer, [chat.prompt(next(t for s in SETS.values() for t in s if t.endswith(own)))])[0]
        assert len(job.prompt) == len(plain) + 40
    found = evaluate(late, {"tea": SETS["tea"]})
    assert (found.overall.prompts, found.overall.left_out) == (2, 1)


def test_seeds_decide_the_draws(options: EvaluationOptions) -> None:
    def said(seed: int) -> list[float]:
        sampled = replace(options, temperature=1.0, noise_share=0.65, seed=seed)
        return [float(tally.said.sum()) for tally in evaluate(sampled, SETS).overall.columns.values()]

    assert said(0) == said(0) != said(1)


def test_faults(options: EvaluationOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="nuts: no prompt fits, with 24 tokens after it, into 40 tokens"):
        evaluate(replace(options, context=40), {"nuts": SETS["nuts"]})
    monkeypatch.setattr(evaluation, "stop_tokens", lambda *_: tuple(range(400)))
    with pytest.raises(ValueError, match="no answer is long enough"):
        evaluate(options, SETS)
