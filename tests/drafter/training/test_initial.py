"""Training that begins with a checkpoint: what is taken from it, how good it is at first, what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ddtree.drafter.checkpoint import load_published, save_published
from ddtree.drafter.config import DrafterConfig, DrafterInfo, Span
from ddtree.drafter.dflash import DFlashModel
from ddtree.drafter.path_head import PathHead
from ddtree.drafter.training import TrainOptions, train_drafter
from ddtree.drafter.training.answers import Answers, AnswerStore, Source
from ddtree.drafter.training.decoder import Decoder, Job
from ddtree.drafter.training.options import quiet
from ddtree.drafter.training.prompts import PromptSet
from ddtree.drafter.training.rows import pack_rows, split
from ddtree.drafter.training.target import Target
from ddtree.drafter.training.trainer import Trainer, read_metrics

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runs() -> dict[str, TrainOptions]:
    return {}


@pytest.fixture
def first(
    options: TrainOptions, runs: dict[str, TrainOptions], tmp_path_factory: pytest.TempPathFactory
) -> TrainOptions:
    """A run whose drafter is finished; of three layers, which is nobody's default."""
    if not runs:
        out = tmp_path_factory.mktemp("first") / "run"
        runs["first"] = dataclasses.replace(options, layers=3, mask_token_id=7, out_dir=out, stop_after="train")
        answer(runs["first"])
        train_drafter(runs["first"])
    return runs["first"]


def answer(options: TrainOptions) -> None:
    """So many answers, however busy the machine is."""
    train_drafter(dataclasses.replace(options, stop_after="prompts"))
    prompts = PromptSet.load(options.out_dir / "prompts.npz")
    chosen = list(zip(prompts.prompts, prompts.kinds, prompts.groups, strict=True))[:80]
    decoder = Decoder(Target(options.target_dir, CPU, torch.float32), (2,), options.slots, options.context, seed=0)
    jobs = (Job(i, ids, float(i % 2), options.max_new) for i, (ids, _, _) in enumerate(chosen))
    answers, store = Answers(), AnswerStore(options.out_dir / "answers", np.uint16)
    for done in decoder.generate(jobs, float("inf"), wait_for_all=True):
        source = Source(*chosen[done.job.key][1:], done.job.key)
        answers.add(done.tokens.astype(np.uint16), len(done.job.prompt), done.job.temperature, source)
    store.append(answers, 1.0)
    store.finish()


@pytest.fixture
def further(options: TrainOptions, first: TrainOptions) -> TrainOptions:
    """A run with the same answers that begins with what the first one made."""
    options.out_dir.mkdir()
    shutil.copy(first.out_dir / "prompts.npz", options.out_dir)
    shutil.copytree(first.out_dir / "answers", options.out_dir / "answers")
    initial = first.out_dir / "checkpoint-int8"
    return dataclasses.replace(options, layers=0, block=0, initial=initial, train_seconds=3.0, stop_after="path")


def trainer(options: TrainOptions, model: DFlashModel, initial: DFlashModel | None = None) -> Trainer:
    answers, _ = AnswerStore(options.out_dir / "answers", np.uint16).load()
    sides = split(answers, options.validation_every)
    rows = (pack_rows(answers, side, options.context, options.seed, CPU) for side in sides)
    target = Target(options.target_dir, CPU, torch.float32)
    return Trainer(options, model.config, target, *rows, folder=options.out_dir, initial=initial)


@pytest.mark.parametrize("form", ["checkpoint", "checkpoint-int8"])
def test_it_begins_as_good_as_the_checkpoint(further: TrainOptions, first: TrainOptions, form: str) -> None:
    model = load_published(first.out_dir / form, dtype=torch.float32)
    as_served = trainer(further, model)
    as_served.model, as_served.feature_size = model, torch.ones(model.fc.weight.shape[1])
    wanted, got = as_served.validate(), trainer(further, model, initial=model).validate()
    assert got["loss"] == pytest.approx(wanted["loss"], abs=1e-3)
    for name in ("chain_greedy", "chain_sampled"):
        assert got[name] == pytest.approx(wanted[name], abs=2e-3)
    again = trainer(further, model, initial=model).finished_model().state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(again[name], tensor, msg=name)


def test_it_has_the_checkpoints_shape_and_learns_on(further: TrainOptions, first: TrainOptions) -> None:
    assert (further.layers, further.block, further.feature_layers, further.mask_token_id) == (3, 8, (1, 2, 3), 7)
    further = dataclasses.replace(further, initial_rate=0.02)  # a fast machine passes over these few answers many times

    def stop(stage: str, fraction: float, message: str) -> None:
        if "step 0" not in message and stage == "train":
            raise InterruptedError(message)

    with pytest.raises(InterruptedError):
        train_drafter(further, stop)
    said: list[str] = []
    out = train_drafter(further, lambda stage, fraction, message: said.append(f"{stage} {message}"))
    assert any(line.startswith("train") and line.endswith("resumed") for line in said)
    begin, *later = read_metrics(out / "metrics.jsonl")
    last = list(read_metrics(first.out_dir / "metrics.jsonl"))[-1]
    assert begin["step"] == 0 and "train_loss" not in begin
    assert begin["loss"] == pytest.approx(last["loss"], abs=0.03), "int8 costs a little"
    assert later[-1]["step"] > 0 and later[-1]["loss"] < begin["loss"] + 0.05
    assert min(line["train_loss"] for line in later) < begin["loss"]
    info = DrafterInfo.read(out / "checkpoint")
    assert (info.num_layers, info.block_size, info.mask_token_id) == (3, 8, 7)


def test_its_path_head_is_trained_on(further: TrainOptions, first: TrainOptions, tmp_path: Path) -> None:
    initial = shutil.copytree(first.out_dir / "checkpoint", tmp_path / "with-head")
    shapes = {"markov_w1.weight": (400, 6), "markov_w2.weight": (400, 6), "gate.weight": (6, 32)}
    tensors = {name: torch.randn(shape, generator=torch.Generator().manual_seed(5)) for name, shape in shapes.items()}
    PathHead(tensors, vocab_size=400, hidden_size=32).save(initial, dtype=torch.float32)
    further = dataclasses.replace(further, initial=initial, train_seconds=1.0, path_seconds=3.0)
    with pytest.raises(ValueError, match="path_rank is 8, but that of the initial drafter's head is 6: leave it out"):
        train_drafter(dataclasses.replace(further, path_rank=8))
    out = train_drafter(further)
    head = PathHead.load(DrafterInfo.read(out / "checkpoint"), dtype=torch.float32, device="cpu")
    assert head is not None
    for name, tensor in tensors.items():
        alike = torch.cosine_similarity(head.tensors[name].flatten(), tensor.flatten(), dim=0)
        assert float(alike) > 0.9 and not torch.equal(head.tensors[name], tensor), name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 2}, "layers is 2, but the initial drafter .* has 3: leave it out"),
        ({"block": 16}, "block is 16"),
        ({"mask_token_id": 5}, "mask_token_id is 5"),
        ({"feature_layers": (0, 1)}, "feature_layers is"),
        ({"initial": Path("nowhere")}, "no drafter at nowhere"),
    ],
)
def test_what_contradicts_it_is_refused(further: TrainOptions, change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(further, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: dataclasses.replace(c, hidden_size=16), "drafter made for another target"),
        (lambda c: dataclasses.replace(c, logit_scale=2.0), "are served, but not trained"),
        (lambda c: dataclasses.replace(c, spans=(Span(window=8),) * 3), "are served, but not trained"),
    ],
)
def test_drafters_that_cannot_be_trained(
    further: TrainOptions, change: Callable[[DrafterConfig], DrafterConfig], words: str, tmp_path: Path
) -> None:
    assert further.initial is not None
    made = change(DrafterConfig.from_dict(json.loads((further.initial / "config.json").read_text())))
    save_published(DFlashModel(made), tmp_path / "other")
    with pytest.raises(ValueError, match=words):
        train_drafter(dataclasses.replace(further, initial=tmp_path / "other"), quiet)
