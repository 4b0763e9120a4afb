"""A bad configuration stops early, with one sentence that says what to do."""

from __future__ import annotations

import importlib.util
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
SERVED = [path for path in CONFIGS if path.stem.startswith(("smollm2", "tiny"))]  # the others need files: test_plan.py
SMOLLM2 = next(path for path in SERVED if path.stem == "smollm2-cpu")
TARGET = {"model": "smollm2-135m-instruct"}


def drafter_for_another_target(folder: Path) -> str:
    shipped = json.loads((models.shipped_checkpoints() / "smollm2-135m/config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**shipped, "hidden_size": 4096, "num_target_layers": 36}))
    return str(folder)


@pytest.mark.parametrize("path", SERVED, ids=lambda path: path.stem)
def test_shipped_configs_are_valid(path: Path, target_dir: Path, tmp_path: Path, monkeypatch: Any) -> None:
    config = load(path)
    if config.verifier.backend == "vllm" and importlib.util.find_spec("vllm") is None:
        with pytest.raises(ConfigError, match="backend 'vllm' needs vLLM, which is not installed"):
            models.find(config)
        return
    if config.target.weights == "random":
        monkeypatch.setenv("DDTREE_CACHE", str(tmp_path))
    assert models.find(config).served_name


@pytest.mark.parametrize("path", [path for path in CONFIGS if path not in SERVED], ids=lambda path: path.stem)
def test_what_needs_files_that_are_not_shipped_says_so(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither a shipped checkpoint|backend 'vllm' needs vLLM") as error:
        models.find(load(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            {"target": TARGET, "tree": {"bugdet": 3}},
            "unknown key 'tree.bugdet'; valid beside it are budget, max_budget, shared_noise, top_k",
        ),
        ({"target": TARGET, "trees": {}}, "unknown key 'trees'"),
        ({"target": TARGET, "tree": {"budget": -1}}, "'tree.budget' = -1: give a number of nodes from 0 on, or auto"),
        ({"target": TARGET, "tree": {"budget": 64}}, "tree.budget (64) is above tree.max_budget (63)"),
        ({}, "'target' is missing"),
        (
            {"target": TARGET, "verifier": {"device": "tpu"}},
            "'verifier.device' = 'tpu': input should be 'cpu' or 'cuda'",
        ),
        (
            {"target": TARGET, "verifier": {"kv_tokens": "many"}},
            "'verifier.kv_tokens' = 'many': input should be a valid integer",
        ),
        ({"target": TARGET, "verifier": {"kv_tokens": -1}}, "'verifier.kv_tokens' = -1: input should be greater"),
        ({"target": TARGET, "verifier": {"kv_tokens": "auto"}}, "kv_tokens auto is sized from GPU memory; on a cpu"),
        ({"target": TARGET, "verifier": {"tensor_parallel_size": 2}}, "above 1 needs backend vllm"),
        (
            {"target": TARGET, "verifier": {"batch_invariant": True, "backend": "vllm"}},
            "batch_invariant is for backend hf on device cpu",
        ),
        (
            {"target": TARGET, "verifier": {"batch_invariant": True, "device": "cuda"}},
            "batch_invariant is for backend hf on device cpu",
        ),
        ({"target": TARGET, "verifier": {"gpu_memory_fraction": 1.5}}, "'verifier.gpu_memory_fraction' = 1.5"),
        ({"target": TARGET, "drafter": {"device": "cuda"}}, "drafter.num_gpus must be above 0"),
        ({"target": TARGET, "drafter": {"num_gpus": 0.5}}, "is for cuda alone"),
        (
            {"target": TARGET, "verifier": {"device": "cuda"}, "hardware": {"gpu": "H200", "gpus": 0}},
            "hardware.gpus (0) is below the 1 that verifier and drafter take",
        ),
        ({"target": TARGET, "hardware": {"gpu": "A100"}}, "'hardware.gpu' = 'A100': input should be 'H100', 'H200'"),
        ({"target": {"model": 3}}, "'target.model' = 3: input should be a valid string"),
        (
            {"target": TARGET, "drafter": {"synthetic": {"record": "r", "acceptance": [0.5], "acceptance_length": 2}}},
            "drafter.synthetic takes one of acceptance and acceptance_length",
        ),
        ({"target": TARGET, "drafter": {"synthetic": {"record": "r"}}}, "takes one of acceptance and"),
        (
            {"target": TARGET, "drafter": {"checkpoint": None, "synthetic": {"record": "r", "acceptance_length": 2}}},
            "drafter.synthetic needs a drafter.checkpoint",
        ),
        (
            {"target": TARGET, "drafter": {"synthetic": {"record": "r", "acceptance": [1.5]}}},
            "'drafter.synthetic.acceptance.0' = 1.5: input should be less than or equal to 1",
        ),
        (
            {"target": TARGET, "drafter": {"synthetic": {"recrod": "r"}}},
            "unknown key 'drafter.synthetic.recrod'; valid beside it are acceptance, acceptance_length, record",
        ),
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
        (
            {"target": TARGET, "drafter": {"synthetic": {"record": "nowhere", "acceptance_length": 2}}},
            "no recording at nowhere; `ddtree bench --record nowhere` writes one",
        ),
        (
            {"target": TARGET, "drafter": {"synthetic": {"record": "nowhere", "acceptance_length": 17}}},
            "an acceptance length of 17.0 is impossible: 15 depths give 1 to 16",
        ),
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


@pytest.mark.timed
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("unknown key", "unknown key 'verifier.thread'"),
        ("missing checkpoint", "neither a shipped checkpoint"),
        ("negative budget", "'tree.budget' = -1"),
        ("another target", "another target"),
        ("more GPUs than there are", "needs 99 GPUs, and this machine has"),
        ("no file", "No such file"),
    ],
)
def test_the_command_stops_in_ten_seconds(fault: str, says: str, tmp_path: Path, target_dir: Path) -> None:
    document = yaml.safe_load(SMOLLM2.read_text())
    args = document["applications"][0]["args"]
    if fault == "unknown key":
        args["verifier"]["thread"] = 2
    elif fault == "missing checkpoint":
        args["drafter"]["checkpoint"] = str(tmp_path / "nothing")
    elif fault == "negative budget":
        args["tree"]["budget"] = -1
    elif fault == "more GPUs than there are":
        args["verifier"] |= {"device": "cuda", "backend": "vllm", "tensor_parallel_size": 99}
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
