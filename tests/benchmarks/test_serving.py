"""The serving benchmark's parts: what it sends, its peers, its recordings and what it writes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.serving import long_prompt, plot, recording, report
from benchmarks.serving.peers import Job, run_peer
from benchmarks.serving.service import Failed, serving
from benchmarks.serving.workload import requests
from ddtree.deployments.commands.bench import MODES, BenchOptions, run_bench
from ddtree.deployments.commands.plan import PlanOptions, make_plan
from ddtree.drafter.recordings import read_recordings
from ddtree.verifier import random_target

REPOSITORY = Path(__file__).parents[2]
CONFIGS = sorted((REPOSITORY / "benchmarks/serving/configs").glob("*.yaml"))
PROMPTS = ["Count to three.", "What is the capital of France?"]
SIZES = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 300, "max_position_embeddings": 256, "initializer_range": 0.3,
}  # fmt: skip


@pytest.mark.parametrize(("concurrency", "sent"), [(1, "abc"), (2, "abca"), (3, "abcabc"), (4, "abcabcab")])
def test_every_prompt_is_sent_in_whole_groups(concurrency: int, sent: str) -> None:
    assert "".join(requests("abc", concurrency)) == sent


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_fits_its_gpu(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert make_plan(config, PlanOptions()).fits


def test_a_service_that_does_not_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(Failed, match=r"nowhere\.yaml"),
        serving(tmp_path / "nowhere.yaml", tmp_path / "log", drafting=True),
    ):
        pass


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Two prompts of different lengths for a tiny random target."""
    random_target.write(SIZES, tmp_path, weights=True)
    return Job(
        model_dir=str(tmp_path), device="cpu", dtype="float32", threads=1, memory_fraction=0.9, stop_token_ids=(),
        prompts=tuple(PROMPTS), max_tokens=6, concurrency=(1, 2),
    )  # fmt: skip


def test_generate_answers_alike_alone_and_padded(job: Job, tmp_path: Path) -> None:
    result: dict[str, Any] = {}
    run_peer("generate", job, tmp_path, 200, result, sys.executable)
    assert result["failures"] == {} and result["setting"] == "dynamic"
    alone, together = (result["runs"][c]["token_ids"] for c in ("1", "2"))
    assert together == alone * 2
    assert result["runs"]["1"]["tokens"] == 12


def test_a_peer_that_fails_says_why(job: Job, tmp_path: Path) -> None:
    result: dict[str, Any] = {}
    run_peer("generate", replace(job, model_dir="/nowhere"), tmp_path, 200, result, sys.executable)
    assert result["runs"] == {} and "/nowhere" in result["failures"]["dynamic"]


def test_a_recording_has_the_names_of_the_requests(server: str, tmp_path: Path) -> None:
    out = tmp_path / "recording.jsonl"
    recording.record(BenchOptions(server, PROMPTS, max_tokens=3, concurrency=2), 3, out)
    recorded = read_recordings(out)
    assert sorted(recorded) == ["bench-0/0", "bench-1/0", "bench-2/0"]
    assert recorded["bench-2/0"] == recorded["bench-0/0"] != recorded["bench-1/0"]


def test_the_recording_s_place_is_put_into_a_configuration(tmp_path: Path) -> None:
    source = next(path for path in CONFIGS if path.stem == "qwen3-8b-shape")
    for record in (None, tmp_path / "r.jsonl"):
        written = yaml.safe_load(recording.write_config(source, record, tmp_path / "c.yaml").read_text())
        found = written["applications"][0]["args"]["drafter"].get("synthetic")
        assert (found and found["record"]) == (record and str(record))


def test_what_a_run_found_is_written(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, few in (("SETTLE_DELTAS", 1), ("QUIET_DELTAS", 4), ("ARRIVALS", 1)):
        monkeypatch.setattr(long_prompt, name, few)
    options = BenchOptions(server, PROMPTS, max_tokens=12)
    run, _ = run_bench(options)
    peer = {
        "setting": "dynamic",
        "failures": {"odd": "x"},
        "runs": {"1": {"tokens_per_s": 2.0, "identical_to_plain": 1}},
    }
    result = {
        "name": "tiny", "command": "c", "runs": [run], "peers": {"generate": peer}, "remarks": ["cut short"],
        "long_prompt": long_prompt.measure(options, 200),
        **{key: run[key] for key in ("model", "machine", "versions", "date", "synthetic_drafter")},
    }  # fmt: skip
    for mode in MODES:
        figures = result["long_prompt"][mode]
        assert figures["before"]["samples"] > 0 and figures["meanwhile"]["samples"] > 0 and figures["p99_ratio"] > 0
    report.write(result, tmp_path)
    plot.draw(result, tmp_path)
    assert json.loads((tmp_path / "serving-tiny.json").read_text())["runs"][0]["identical"] == 1
    text = (tmp_path / "serving-tiny.md").read_text()
    for words in ("generate, dynamic", "did not run", "200 tokens beside 4 streams", "cut short", "| rest |"):
        assert words in text
    assert (tmp_path / "serving-tiny.png").stat().st_size > 0
