"""The model card, the target's name in it, and the plot."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ddtree.drafter.training import TrainOptions
from ddtree.drafter.training.card import WIDTH, Facts, card, table, target_name
from ddtree.drafter.training.plot import draw

FACTS = Facts("1 × GPU", "2.11.0", "2026-11-29", "12 answers (12 task), 0.01M new tokens, 0.02M with prompts")
ROW = {"chain": 2.5, "8": 3.0, "63": 3.75, "rounds": 1234}
METRICS = [
    {"step": 100 * i, "seconds": 60.0 * i, "passes": 0.3 * i, "train_loss": train, "loss": loss}
    | {"chain_greedy": 2.0 + i, "chain_sampled": 1.5 + i / 10}
    for i, (train, loss) in enumerate([(10.3, 4.6), (4.4, 4.3), (4.2, 4.1)], 1)
]


@pytest.mark.parametrize(
    ("manifest", "hub", "name"),
    [
        ({"name": "embedded-name"}, "maker/model", "embedded-name"),
        ({"converter": 1}, "maker/model-1.5", "maker/model-1.5"),
        (None, "model", "model"),
        (None, "/somewhere/models/model", "folder"),
        (None, "./model", "folder"),
        (None, "a/b/model", "folder"),
        (None, "C:\\models\\model", "folder"),
        (None, "", "folder"),
        (None, None, "folder"),
    ],
)
def test_target_name(tmp_path: Path, manifest: dict[str, Any] | None, hub: str | None, name: str) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({} if hub is None else {"_name_or_path": hub}))
    if manifest is not None:
        (target / "ddtree.json").write_text(json.dumps(manifest))
    assert target_name(target) == name


def test_a_relative_path_that_exists_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models/base").mkdir(parents=True)
    Path("tuned").mkdir()
    Path("tuned/config.json").write_text('{"_name_or_path": "models/base"}')
    assert target_name(Path("tuned")) == "tuned"


def test_card_says_what_was_done_and_no_path(options: TrainOptions) -> None:
    told = dataclasses.replace(options, target_credit="by Someone, MIT")
    text = card(told, "tiny", FACTS, METRICS[-1], {"held_out": {"chat": ROW}}, {"bf16": 3.0, "int8": 1.5})
    flat = " ".join(text.split())
    for words in (FACTS.data, FACTS.device, FACTS.date, "tiny (by Someone, MIT)", "(questions)", "300 steps"):
        assert words in flat
    assert "| chat | 2.50 | 3.00 | 3.75 | 1,234 |" in text.splitlines()
    assert "minutes" not in text, "the seconds were given, so there was no budget"
    for path in (options.target_dir, options.out_dir, *options.prompts, *options.sources, *options.evaluate):
        assert str(path) not in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_card_without_figures_says_so(options: TrainOptions) -> None:
    bare = dataclasses.replace(options, generate_seconds=None, train_seconds=None, minutes=9, prompts=())
    text = " ".join(card(bare, "tiny", FACTS, {}, {}, {}).split())
    assert "Not measured." in text and "a budget of 9 minutes" in text and "prompt files (" not in text
    assert table({}) == "| set |  |\n|---|"


def test_facts_survive_their_file(tmp_path: Path) -> None:
    FACTS.save(tmp_path / "facts.json")
    assert Facts.load(tmp_path / "facts.json") == FACTS


def test_the_first_training_loss_does_not_stretch_the_plot() -> None:
    losses, lengths = draw(METRICS, "tiny", "1 × GPU").axes
    assert 4.6 < losses.get_ylim()[1] < 5.0
    assert lengths.get_ylim()[0] == 1.0 and "random position" in lengths.get_title(loc="left")
    only, _ = draw(METRICS[:1], "tiny", "1 × GPU").axes
    assert len(only.lines) == 2 and all(len(line.get_xdata()) == 1 for line in only.lines)
