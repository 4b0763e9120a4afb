"""A bad configuration stops early, with one sentence that says what to do."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddtree.deployments import models
from ddtree.deployments.config import AppConfig, load
from ddtree.deployments.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
TARGET = {"model": "smollm2-135m-instruct"}


def drafter_for_another_target(folder: Path) -> str:
    shipped = json.loads((models.shipped_checkpoints() / "smollm2-135m/config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shipped, "hidden_size": 4096, "num_target_layers": 36}))
    return str(folder)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_are_valid(path: Path, target_dir: Path) -> None:
    assert models.find(load(path)).served_name


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            {"target": TARGET, "tree": {"bugdet": 3}},
            "unknown key 'tree.bugdet'; valid beside it are budget, max_budget, top_k",
        ),
        ({"target": TARGET, "trees": {}}, "unknown key 'trees'"),
        ({"target": TARGET, "tree": {"budget": -1}}, "'tree.budget' = -1: input should be greater than or equal to 0"),
        ({"target": TARGET, "tree": {"budget": 64}}, "tree.budget (64) is above tree.max_budget (63)"),
        ({}, "'target' is missing"),
        ({"target": {"model": 3}}, "'target.model' = 3: input should be a valid string"),
    ],
)
def test_what_the_schema_refuses(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        AppConfig.parse(args, "file")
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            {"target": TARGET, "drafter": {"checkpoint": "nowhere"}},
            "drafter.checkpoint 'nowhere' is neither a shipped checkpoint",
        ),
        ({"target": {"model": "nowhere"}}, "model 'nowhere' is no directory"),
        ({"target": TARGET, "verifier": {"backend": "tgi"}}, "unknown verifier backend 'tgi'; valid are: hf"),
        (
            {"target": TARGET, "verifier": {"kv_tokens": 100}},
            "verifier.kv_tokens (100) must hold one sequence of full length",
        ),
    ],
)
def test_what_does_not_exist_or_fit(args: dict[str, Any], says: str, target_dir: Path) -> None:
    with pytest.raises(ConfigError) as error:
        models.find(AppConfig.parse(args))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_drafter_made_for_another_target(tmp_path: Path, target_dir: Path) -> None:
    args = {"target": TARGET, "drafter": {"checkpoint": drafter_for_another_target(tmp_path)}}
    with pytest.raises(ConfigError, match="another target"):
        models.find(AppConfig.parse(args))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("unknown key", "unknown key 'verifier.thread'"),
        ("missing checkpoint", "neither a shipped checkpoint"),
        ("negative budget", "'tree.budget' = -1"),
        ("another target", "another target"),
        ("no file", "No such file"),
    ],
)
def test_the_command_stops_in_ten_seconds(fault: str, says: str, tmp_path: Path, target_dir: Path) -> None:
    document = yaml.safe_load(CONFIGS[0].read_text())
    args = document["applications"][0]["args"]
    if fault == "unknown key":
        args["verifier"]["thread"] = 2
    elif fault == "missing checkpoint":
        args["drafter"]["checkpoint"] = str(tmp_path / "nothing")
    elif fault == "negative budget":
        args["tree"]["budget"] = -1
    elif fault == "another target":
        args["drafter"]["checkpoint"] = drafter_for_another_target(tmp_path)
    path = tmp_path / "config.yaml"
    if fault != "no file":
        path.write_text(yaml.safe_dump(document))
    begin = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-m", "ddtree.deployments.commands.main", "serve", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 1
    assert time.monotonic() - begin < 10
    assert "\n" not in run.stderr.strip() and "Traceback" not in run.stderr, "one sentence"
    assert says in run.stderr
