"""The files of a finished run: both checkpoint forms, model card, plot. Knows no training loop."""

from __future__ import annotations

import importlib.util
import platform
import shutil
from pathlib import Path
from typing import Any

import torch

from ddtree.drafter.checkpoint import save_int8, save_published
from ddtree.drafter.dflash import DFlashModel
from ddtree.drafter.training.acceptance import as_table
from ddtree.drafter.training.options import TrainOptions

PUBLISHED, INT8 = "checkpoint", "checkpoint-int8"


def save_checkpoints(model: DFlashModel, out_dir: Path) -> None:
    """`checkpoint/` in bf16, the published form, and `checkpoint-int8/`, half its size."""
    save_published(model, out_dir / PUBLISHED)
    save_int8(model, out_dir / INT8)


def save_card(
    options: TrainOptions, target_name: str, data: str, metrics: list[dict[str, Any]], evaluation: dict[str, Any]
) -> None:
    """`README.md` in the run's folder and in both checkpoint folders."""
    text = _card(options, target_name, data, metrics[-1] if metrics else {}, evaluation)
    (options.out_dir / "README.md").write_text(text)
    for folder in (PUBLISHED, INT8):
        shutil.copy(options.out_dir / "README.md", options.out_dir / folder / "README.md")


def save_plot(metrics: list[dict[str, Any]], path: Path) -> str:
    """Loss and acceptance over training time, as PNG; returns a line that says what was done."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed (pip install 'ddtree-serve[train]')"
    from matplotlib.figure import Figure

    seconds = [m["seconds"] for m in metrics]
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(seconds, [m["train_loss"] for m in metrics], marker=".", label="training")
    left.plot(seconds, [m["loss"] for m in metrics], marker=".", label="validation")
    left.set(xlabel="training time in s", ylabel="loss", title="Cross-entropy, early slots weigh more")
    right.plot(seconds, [m["chain_greedy"] for m in metrics], marker=".", label="greedy answers")
    right.plot(seconds, [m["chain_sampled"] for m in metrics], marker=".", label="sampled answers")
    right.set(xlabel="training time in s", ylabel="tokens per round", title="Acceptance length of a chain, validation")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    return f"plot: {path.name}"


def _card(o: TrainOptions, target: str, data: str, last: dict[str, Any], evaluation: dict[str, Any]) -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    tables = "\n\n".join(
        f"**{title}**\n\n{as_table(evaluation[key])}"
        for key, title in (
            ("held_out", "Held-out prompts (int8 form)"),
            (
                "validation",
                "Own validation split (int8 form); flatters, because its prompts resemble the training data",
            ),
        )
        if evaluation.get(key)
    )
    return f"""---
license: {o.licence}
base_model: {target}
tags: [speculative-decoding, dflash, draft-tree]
---
# A DFlash drafter for {target}

{o.layers} layers, blocks of {o.block}: the first slot is the bonus token, the others are drafted in one pass. Embedding and
lm_head are the target's and not in here. `config.json` and the tensor names are those of published DFlash checkpoints;
the int8 form has one scale per row.

## Use
Give this folder as the drafter of `ddtree serve`, together with the target it was made for. Another target is refused.

## Data
{data}. All answers are the target's own: 40 % greedy, the rest at temperatures 0.7 and 1.0. Prompts come from the given
files, from Python functions and documentation on the training machine, from the project's own wordings and from the target
itself. The held-out sets were never trained on. No prompts or answers are part of this checkpoint.

## Recipe
`ddtree train-drafter`: {o.generation:.0f} s of generation, {o.training:.0f} s of training on {device}; Muon at
{o.learning_rate} for matrices, AdamW at {o.norm_learning_rate} for norms, one warm-up and cosine over the training time; rows of
{o.context} tokens with {o.anchors} blocks each, {o.batch} rows a step; slot k weighs exp(-(k-1)/{o.slot_decay:g}); hard labels on
greedy answers, the target's distribution on sampled ones. Steps: {last.get("step", 0)}, passes over the data:
{last.get("passes", 0)}. Last validation: loss {last.get("loss", "?")}, chain {last.get("chain_greedy", "?")} greedy,
{last.get("chain_sampled", "?")} sampled.

## Acceptance
Mean tokens per round (accepted + bonus), greedy, exact offline simulation; `chain` is the most likely chain, numbers are
budgets of best-first trees; rounds start at the first {o.evaluate_tokens} answer tokens.

{tables or "Not measured."}

## Licence
{o.licence}, as the target's; see the target's own licence as well.
"""
