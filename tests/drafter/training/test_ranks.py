"""Two processes under torchrun: the steps of one with the same batch, and a whole run."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddtree.drafter.training import TrainOptions, train_drafter
from ddtree.drafter.training.answers import AnswerStore
from ddtree.drafter.training.prompts import PromptSet
from ddtree.drafter.training.ranks import ALONE, Ranks
from ddtree.drafter.training.trainer import read_metrics

CHECKS = Path(__file__).with_name("rank_checks.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def two(*arguments: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*TORCHRUN, *arguments], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def alone(target_dir: Path, run: Path) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("rank_checks", CHECKS)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, Any] = module.steps(target_dir, run)
    return found


def test_a_stray_rank_is_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "8")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert Ranks.join() == ALONE


def test_a_whole_run_of_two(options: TrainOptions) -> None:
    """The answers are shared out, the first process writes the files, and a later run of one goes on with them."""
    arguments: list[str] = []
    options = dataclasses.replace(
        options, path_rank=4, path_seconds=1.0, generate_seconds=6.0, train_seconds=2.0, stop_after="path"
    )
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value != field.default and field.name not in ("feature_layers", "mask_token_id"):
            flag = "--" + field.name.replace("_", "-")
            arguments += [flag, *map(str, value if isinstance(value, tuple) else [value])]
    two("-m", "ddtree.drafter.training", *arguments)
    names = {path.name for path in (options.out_dir / "answers").iterdir()}
    assert {"shard-0000.npz", "rank1-shard-0000.npz", "finished"} <= names
    answers, seconds = AnswerStore(options.out_dir / "answers", np.uint16).load()
    mine = [len(AnswerStore(options.out_dir / "answers", np.uint16, rank).load(mine=True)[0]) for rank in (0, 1)]
    assert sum(mine) == len(answers) and max(mine) < len(answers) and seconds > 1.5 * options.generation
    columns = zip(answers.kind, answers.key, answers.group, answers.tokens, answers.prompt_length, strict=True)
    first = Counter((group, tuple(ids[:n])) for kind, key, group, ids, n in columns if key >= 0 and kind != "invented")
    prompts = PromptSet.load(options.out_dir / "prompts.npz")
    assert first <= Counter(zip(prompts.groups, map(tuple, prompts.prompts), strict=True)), "none is answered by both"
    assert list(read_metrics(options.out_dir / "metrics.jsonl"))[-1]["step"] > 3
    check_steps(options)
    checkpoint = train_drafter(dataclasses.replace(options, stop_after="publish"))
    assert (checkpoint / "path_head").is_dir() and (checkpoint / "README.md").is_file()


def check_steps(options: TrainOptions) -> None:
    """Two processes take the steps that one takes with the same batches."""
    one = alone(options.target_dir, options.out_dir)
    both = json.loads(two(str(CHECKS), str(options.target_dir), str(options.out_dir)).splitlines()[-1])
    assert both["first"] == pytest.approx(one["first"], rel=1e-4)
    assert both["losses"] == pytest.approx(one["losses"], rel=2e-3), "Muon's bfloat16 tells the two apart a little"
    assert one["losses"][-1] < one["losses"][0]
    for name in ("loss", "chain_greedy"):
        assert both["validation"][name] == pytest.approx(one["validation"][name], rel=1e-2)
        assert both["validation"]["path"][name] == pytest.approx(one["validation"]["path"][name], rel=1e-2)


def test_a_batch_that_cannot_be_shared_is_refused(options: TrainOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    from ddtree.drafter.training.ranks import Ranks
    from ddtree.drafter.training.trainer import Trainer

    with pytest.raises(ValueError, match="2 rows cannot be shared evenly by 3 processes"):
        Trainer(options, None, None, range(9), range(9), options.out_dir, ranks=Ranks(0, 3))  # type: ignore[arg-type]
