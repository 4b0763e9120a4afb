"""The command `ddtree`: its options, its faults, and a chat with a running deployment."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddtree.deployments.commands.main import app
from ddtree.drafter.training.options import TrainOptions

NOWHERE = "http://127.0.0.1:9"  # the discard port: nobody listens


def ddtree(*arguments: str, typed: str | None = None) -> tuple[int, str]:
    """Run the command in this process; return its exit code and what it printed."""
    done = CliRunner().invoke(app, list(arguments), input=typed, env={"COLUMNS": "200"})
    return done.exit_code, done.output


def test_help_lists_the_commands_and_loads_no_torch() -> None:
    code, text = ddtree("--help")
    assert code == 0
    for command in ("serve", "chat", "bench", "train-drafter", "eval-drafter", "doctor", "prepare"):
        assert command in text
    check = "import sys, ddtree.deployments.commands.main; sys.exit('torch' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


def test_training_options_are_the_training_s_own() -> None:
    code, text = ddtree("train-drafter", "--help")
    assert code == 0
    for field in fields(TrainOptions):
        name = "target" if field.name == "target_dir" else field.name
        assert f"--{name.replace('_', '-')}" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("prepare", "gpt-9"), "valid are"),
        (("bench", "--prompts", "/nowhere.jsonl"), "/nowhere.jsonl"),
        (("chat", "--url", NOWHERE), "ddtree serve"),
        (("serve", "/nowhere.yaml"), "/nowhere.yaml"),
        (("train-drafter", "--target", "/nowhere", "--out-dir", "x"), "/nowhere"),
        (
            ("train-drafter", "--initial", "nobody's", "--out-dir", "x"),
            "--initial 'nobody's' is neither a shipped checkpoint",
        ),
    ],
)
def test_a_fault_is_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    began = time.monotonic()
    code, text = ddtree(*arguments)
    assert code == 1
    assert text.startswith("error: ")
    assert words in text
    assert "Traceback" not in text
    assert time.monotonic() - began < 10


def test_bench_without_a_server(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n', encoding="utf-8")
    code, text = ddtree("bench", "--prompts", str(path), "--url", NOWHERE)
    assert code == 1
    assert "no answer from" in text


def test_chat_shows_the_answer_and_its_figures(server: str) -> None:
    question = "What is the capital of France?"
    code, text = ddtree("chat", "--url", server, "--max-tokens", "12", "--compare", typed=f"{question}\n/new\n/quit\n")
    assert code == 0, text
    assert text.count("Paris") >= 2
    assert "tokens a round" in text
    assert "times as fast, the same tokens" in text
    assert "▇" in text


def test_chat_survives_a_refused_message(server: str) -> None:
    code, text = ddtree("chat", "--url", server, "--budget", "1000000", typed="Hi\n")
    assert code == 0
    assert "maximum" in text
