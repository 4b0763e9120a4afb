"""Options, command-line front, sources, chat format and prompts."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree.drafter.training import TrainOptions
from ddtree.drafter.training.__main__ import parser
from ddtree.drafter.training.chat import ChatFormat, choose_mask_token, load_tokenizer, stop_tokens
from ddtree.drafter.training.options import quiet
from ddtree.drafter.training.prompts import PromptSet, make_prompts, read_prompts
from ddtree.drafter.training.sources import harvest


def test_importing_the_options_needs_no_torch() -> None:
    code = "import sys, ddtree.drafter.training; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_option_is_a_flag_and_defaults_agree(target_dir: Path, tmp_path: Path) -> None:
    given = parser().parse_args(["--target-dir", str(target_dir), "--out-dir", str(tmp_path), "--no-resume"])
    made = TrainOptions(**vars(given))
    assert made == TrainOptions(target_dir=target_dir, out_dir=tmp_path, resume=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stop_after": "bake"}, "known: prompts, answers, train, path, publish"),
        ({"block": 12}, "divisor"),
        ({"path_kind": "deep"}, "known: bilinear, vanilla, gated, mlp"),
        ({"path_joint": -1.0}, "a weight"),
        ({"anchors": 7}, "multiples of 128"),
        ({"max_new": 250}, "no room"),
        ({"prompts": ("nowhere.jsonl",)}, "not found: nowhere.jsonl"),
        ({"target_dir": Path("nowhere")}, "config.json"),
    ],
)
def test_impossible_options_say_why(options: TrainOptions, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(options, **change)  # type: ignore[arg-type]


def test_time_budget_is_split(target_dir: Path, tmp_path: Path) -> None:
    o = TrainOptions(target_dir=target_dir, out_dir=tmp_path, minutes=20)
    assert 180 <= o.generation <= 240 and 660 <= o.training <= 780
    assert o.generation + o.training < 20 * 60


def test_chat_format_rebuilds_the_template(target_dir: Path) -> None:
    tokenizer = load_tokenizer(target_dir)
    chat = ChatFormat.of(tokenizer)
    turns = [
        {"role": "user", "content": "a {b}"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    whole = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert chat.prompt("a {b}") + "c" + str(chat.turn) + "d" + chat.assistant == whole
    assert stop_tokens(target_dir, tokenizer) == (2,)


def test_a_template_without_a_second_turn_gives_none(target_dir: Path) -> None:
    tokenizer = load_tokenizer(target_dir)
    one_turn = "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}"
    tokenizer.chat_template = one_turn + "Q: {{ messages[0]['content'] }} A:"
    assert ChatFormat.of(tokenizer) == ChatFormat("Q: ", " A:", None)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        ChatFormat.of(tokenizer)


def test_mask_token_is_idle(target_dir: Path) -> None:
    tokenizer = load_tokenizer(target_dir)
    assert choose_mask_token(tokenizer, len(tokenizer)) == 4  # the last special token that no template uses
    assert choose_mask_token(tokenizer, len(tokenizer) + 8) == len(
        tokenizer
    )  # a padded vocabulary: its first spare row


def test_harvest_takes_functions_and_prose_once(source_dir: Path) -> None:
    (source_dir / "broken.py").write_text("def (")
    found = harvest([source_dir, source_dir], random.Random(0), 100, 100, 30.0)
    assert len(found.functions) == len({f.name for f in found.functions}) == 12
    assert all(f.stub.rstrip().endswith('"""') and f.source.startswith("def ") for f in found.functions)
    assert len(found.passages) == len(set(found.passages)) > 0
    assert not harvest([source_dir], random.Random(0), 100, 100, 0.0).functions


def test_prompts_survive_their_file_and_leave_out_what_is_held_out(options: TrainOptions, tmp_path: Path) -> None:
    held_out = tmp_path / "held.jsonl"
    held_out.write_text(json.dumps({"question": "ann has 3 nuts.  How many are 3 and two?"}) + "\n")
    made = make_prompts(dataclasses.replace(options, evaluate=(held_out,)), 400, quiet)
    assert made.kinds.count("question") == 29 * 3
    assert all(len(p) <= options.longest_prompt for p in made.prompts)
    made.save(tmp_path / "p.npz", made.prompts[0].dtype.type)
    loaded = PromptSet.load(tmp_path / "p.npz")
    assert loaded.kinds == made.kinds and loaded.groups == made.groups
    assert [p.tolist() for p in loaded.prompts] == [p.tolist() for p in made.prompts]
    assert loaded.turn is not None and loaded.turn.tolist() == made.turn.tolist()  # type: ignore[union-attr]
    assert len(loaded.wraps) == len(made.wraps) and len(loaded.follows) == len(made.follows)


def test_a_prompt_line_without_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "x"}\n\n{"answer": "y"}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:3"):
        list(read_prompts(path))
