"""The whole pipeline on a CPU: stages, interruption and resumption, what is published."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddtree.drafter.checkpoint import load_published
from ddtree.drafter.config import DrafterInfo
from ddtree.drafter.path_head import PathHead
from ddtree.drafter.training import TrainOptions, train_drafter
from ddtree.drafter.training.answers import Answers, AnswerStore, _Jobs
from ddtree.drafter.training.decoder import Decoder, Job
from ddtree.drafter.training.masks import DocumentMask
from ddtree.drafter.training.prompts import PromptSet
from ddtree.drafter.training.rows import pack_rows, split
from ddtree.drafter.training.target import Target, causal
from ddtree.drafter.training.trainer import Trainer


class Interrupt(Exception):
    pass


class Recorder:
    """A report that remembers, and raises at the first line that holds `stop_at`."""

    def __init__(self, stop_at: str | None = None) -> None:
        self.lines: list[tuple[str, float, str]] = []
        self.stop_at = stop_at

    def __call__(self, stage: str, fraction: float, message: str) -> None:
        self.lines.append((stage, fraction, message))
        if self.stop_at and self.stop_at in f"{stage} {message}":
            raise Interrupt(message)

    def stages(self) -> set[str]:
        return {stage for stage, _, _ in self.lines}


def test_interrupted_run_continues_and_publishes(options: TrainOptions) -> None:
    with pytest.raises(Interrupt):
        train_drafter(options, Recorder("train step 0"))
    shards = {p.name: p.stat().st_mtime_ns for p in (options.out_dir / "answers").iterdir()}
    middle = Recorder("sampled")  # the first line after a validation
    with pytest.raises(Interrupt):
        train_drafter(options, middle)
    stopped = int(middle.lines[-1][2].split(",")[0].removeprefix("step "))
    last = Recorder()
    options = dataclasses.replace(options, target_name="tiny")  # what only the card says may change on the way
    checkpoint = train_drafter(options, last)
    assert shards == {p.name: p.stat().st_mtime_ns for p in (options.out_dir / "answers").iterdir()}
    first = next(message for stage, _, message in last.lines if stage == "train")
    assert first.startswith(f"step {stopped},") and first.endswith("resumed")
    metrics = [json.loads(line) for line in (options.out_dir / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == sorted({m["step"] for m in metrics})
    assert metrics[-1]["seconds"] >= options.training
    check_published(options, checkpoint, metrics)
    again = Recorder()
    assert train_drafter(options, again) == checkpoint
    assert again.stages() == {"publish"}, "nothing is left to do but to say the figures"


def check_published(options: TrainOptions, checkpoint: Path, metrics: list[dict[str, Any]]) -> None:
    out = options.out_dir
    info = DrafterInfo.read(checkpoint)
    assert (info.target_layer_ids, info.mask_token_id, info.block_size) == ((1, 2, 3), 4, options.block)
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")
    card = (checkpoint / "README.md").read_text()
    assert "base_model: tiny\n" in card and "| chat |" in card and str(out) not in card
    assert json.loads((out / "facts.json").read_text())["data"] in " ".join(card.split())
    assert (out / "checkpoint-int8" / "README.md").read_text() == card
    sizes = [(out / form / "model.safetensors").stat().st_size for form in ("checkpoint-int8", "checkpoint")]
    assert sizes[0] < 0.75 * sizes[1]
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert set(evaluation) == {"validation", "validation_bf16", "held_out"}
    for row in evaluation["validation"].values():
        columns = [row[c] for c in ("chain", "8", "16", "32", "63")]
        assert columns == sorted(columns) and columns[0] >= 1.0
    # the published weights take unscaled features and still do what the trained ones did
    target = Target(options.target_dir, torch.device("cpu"), torch.float32)
    answers, _ = AnswerStore(out / "answers", np.uint16).load()
    train, validation = split(answers, options.validation_every)
    rows = [pack_rows(answers, side, options.context, options.seed, target.device) for side in (train, validation)]
    model = load_published(checkpoint, dtype=torch.float32)
    trainer = Trainer(options, model.config, target, *rows, folder=out / "again")
    trainer.model, trainer.feature_size = model, torch.ones(model.fc.weight.shape[1])
    loaded = trainer.validate()
    assert loaded["loss"] == pytest.approx(metrics[-1]["loss"], abs=0.02)
    assert loaded["chain_greedy"] == pytest.approx(metrics[-1]["chain_greedy"], abs=0.05)


def test_a_finished_drafter_gets_a_path_head(options: TrainOptions) -> None:
    """In a stage of its own: the drafter's files stay, and a run that had none goes on."""
    options = dataclasses.replace(options, stop_after="train")
    out = train_drafter(options)
    weights = {form: (out / form / "model.safetensors").read_bytes() for form in ("checkpoint", "checkpoint-int8")}
    last = Recorder()
    checkpoint = train_drafter(dataclasses.replace(options, path_rank=8, path_seconds=6.0, stop_after="publish"), last)
    assert "path" in last.stages() and "train" not in last.stages()
    found = json.loads((out / "path.json").read_text())
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert found["step"] > 5 and found["loss"] < metrics[-1]["loss"], "what came before says something of what comes"
    for form, data in weights.items():
        assert (out / form / "model.safetensors").read_bytes() == data
        info = DrafterInfo.read(out / form)
        head = PathHead.load(info, dtype=torch.float32, device="cpu")
        assert head is not None and head.tensors["gate.weight"].shape == (8, info.hidden_size)
        assert head.tensors["markov_w2.weight"].abs().max() > 0
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert {"validation_path", "held_out_path"} < set(evaluation)
    assert "chosen by the path head" in (checkpoint / "README.md").read_text()


def test_drafter_and_path_head_learn_at_once(options: TrainOptions) -> None:
    """Interrupted in between, and in one stage. The drafter learns slowly: few steps suffice to see both learn, however busy the
    machine is."""
    options = dataclasses.replace(
        options, path_rank=32, path_joint=4.0, path_kind="mlp", learning_rate=0.002, stop_after="path"
    )
    with pytest.raises(Interrupt):
        train_drafter(options, Recorder("sampled"))
    last = Recorder()
    out = train_drafter(options, last)
    assert "path" not in last.stages() and any(message.endswith("resumed") for _, _, message in last.lines)
    first, *_, end = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    assert end["loss"] < first["loss"] and end["path"]["loss"] < min(first["path"]["loss"], end["loss"])
    for form in ("checkpoint", "checkpoint-int8"):
        head = PathHead.load(DrafterInfo.read(out / form), dtype=torch.float32, device="cpu")
        assert head is not None and head.kind == "mlp" and head.tensors["markov_w2.weight"].abs().max() > 0
    with pytest.raises(ValueError, match="path_kind 'mlp'"):
        train_drafter(dataclasses.replace(options, path_kind="gated"))


def test_an_out_dir_of_another_run_is_refused(options: TrainOptions) -> None:
    first = dataclasses.replace(options, stop_after="prompts")
    assert train_drafter(first) == options.out_dir
    with pytest.raises(ValueError, match=r"holds a run with other options: layers 2 \(now 3\)"):
        train_drafter(dataclasses.replace(first, layers=3))
    with pytest.raises(ValueError, match="not empty"):
        train_drafter(dataclasses.replace(first, resume=False))


def test_too_little_data_says_what_to_do(options: TrainOptions) -> None:
    with pytest.raises(ValueError, match="generate for longer, or give a smaller batch"):
        train_drafter(dataclasses.replace(options, generate_seconds=0.5, batch=64))


def test_interrupted_generation_keeps_what_it_has(options: TrainOptions) -> None:
    answers_only = dataclasses.replace(options, stop_after="answers")
    with pytest.raises(Interrupt):
        train_drafter(answers_only, Recorder("new tokens"))
    store = AnswerStore(options.out_dir / "answers", np.uint16)
    before, spent = store.load()
    assert len(before) > 0 and not store.finished and spent < options.generation
    train_drafter(answers_only)
    after, total = store.load()
    assert store.finished and len(after) > len(before) and total < options.generation + 1
    first_round = [key for key in after.key if key >= 0]
    assert len(first_round) == len(set(first_round)), "no prompt of the first round is answered twice"
    assert all(after.tokens[i].tolist() == before.tokens[i].tolist() for i in range(len(before)))


def test_later_prompts_come_after_earlier_conversations(options: TrainOptions) -> None:
    """Of any length, each as it would be without, and never a validation answer before a training prompt."""
    options = dataclasses.replace(options, long_share=0.7, stop_after="prompts")
    train_drafter(options)
    prompts = PromptSet.load(options.out_dir / "prompts.npz")
    jobs = _Jobs(options, prompts, [], Answers())
    opening, asked = prompts.opening.tolist(), [p.tolist() for p in prompts.prompts]
    lengths, late = [], 0
    for job in itertools.islice(jobs, 4 * len(asked)):
        source, ids = jobs.sources[job.key], job.prompt.tolist()
        text = "".join(f"<{i}>" for i in ids)
        assert len(ids) <= options.longest_prompt and text.count("".join(f"<{i}>" for i in opening)) == 1
        if source.kind != "built" and source.key < 0:
            own = next(p for p in asked if ids[-len(p) + len(opening) :] == p[len(opening) :])
            late += len(ids) > len(own)
            lengths.append(len(ids))
        mark = 500 + (source.group % options.validation_every == 0)  # stands for an answer: says of which side it is
        assert 1001 - mark not in ids
        jobs.answered(np.asarray([*ids, mark, 2]), len(ids), source)
    assert 0.3 < late / len(lengths) < 0.9 and max(lengths) > 0.8 * options.longest_prompt


def test_decoder_equals_the_model(target_dir: Path) -> None:
    """Greedy answers of continuous batching are those of the whole sequence run at once."""
    target = Target(target_dir, torch.device("cpu"), torch.float32)
    decoder = Decoder(target, (2,), slots=3, size=96, seed=0)
    rng = np.random.default_rng(0)
    jobs = [Job(i, rng.integers(5, 400, int(rng.integers(3, 40))), 0.0, 20) for i in range(8)]
    answers = list(decoder.generate(iter(jobs), float("inf"), wait_for_all=True))
    assert sorted(a.job.key for a in answers) == list(range(8))
    for answer in answers:
        ids, start = torch.from_numpy(answer.tokens)[None], len(answer.job.prompt)
        hidden = target.hidden(ids, torch.arange(ids.shape[1])[None], causal)
        drawn = (hidden @ target.head.T).argmax(-1)[0, start - 1 : -1]
        assert drawn.tolist() == answer.tokens[start:].tolist()
        assert len(drawn) == 20 or answer.tokens[-1] == 2


def test_features_are_the_models_hidden_states(target_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    target = Target(target_dir, torch.device("cpu"), torch.float32)
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    ids = torch.randint(5, 400, (1, 30))
    mask = DocumentMask(1, 30, target.device)
    features, hidden = target.observe(ids, torch.arange(30)[None], (0, 3), mask.dense())
    with torch.no_grad():
        wanted = model(ids, output_hidden_states=True)
    both = torch.cat([wanted.hidden_states[1], wanted.hidden_states[4]], -1)  # layer i is hidden_states[i + 1]
    torch.testing.assert_close(features, both, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(hidden @ target.head.T, wanted.logits, atol=1e-4, rtol=1e-4)
