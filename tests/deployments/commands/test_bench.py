"""The figures of a benchmark, from answers written by hand and from a running deployment."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ddtree.deployments.commands.bench import Pair, Run, row, summarise
from ddtree.deployments.commands.bench_view import histogram, show
from ddtree.deployments.commands.main import app
from ddtree.deployments.commands.prompts import read_prompts
from ddtree.deployments.requests import STAGES
from ddtree.drafter.recordings import Recording, read_recordings

PROMPTS = Path(__file__).parents[2] / "data" / "prompts.jsonl"


def run(ids: list[int], seconds: float, counts: list[int], verify: float = 0.0) -> Run:
    """Return an answer whose rounds accepted `counts[i]` times i draft tokens."""
    rounds, accepted = sum(counts), sum(i * n for i, n in enumerate(counts))
    figures: dict[str, Any] = {
        "rounds": rounds,
        "accepted_tokens": accepted,
        "drafted_tokens": 16 * rounds,
        "acceptance_histogram": counts,
        "acceptance_length": 1 + accepted / rounds,
        "fallback_rounds": 1,
        "stage_seconds": dict.fromkeys(STAGES, 0.0) | {"verify": verify},
        "prefill_seconds": 0.25,
        "queue_seconds": 0.5,
    }
    return Run(ids, seconds, figures, prompt_tokens=3)


PAIRS = [
    Pair("a", run([1, 2, 3, 4], 2.0, [4], 1.0), run([1, 2, 3, 4], 1.0, [1, 0, 1], 0.5), "bench-0"),
    Pair("b", run([1, 2, 3, 4], 2.0, [4], 1.0), run([1, 2, 9], 1.0, [0, 0, 0, 1], 0.7), "bench-1"),
]


def test_the_figures_of_two_prompts() -> None:
    result = summarise(PAIRS, {"plain": 4.0, "speculative": 2.0})
    assert result["plain_tokens_per_s"] == 2.0
    assert result["speculative_tokens_per_s"] == 3.5
    assert result["speedup"] == 1.75
    assert result["acceptance_length"] == pytest.approx((2 + 3 + 3) / 3), "a mean over rounds, not over prompts"
    assert result["acceptance_histogram"] == [1, 0, 1, 1]
    assert result["identical"] == 0.5
    assert result["rounds"] == {"plain": 8, "speculative": 3}
    assert result["stage_seconds"]["speculative"]["verify"] == pytest.approx(1.2)
    assert result["stage_ms_per_round"]["speculative"]["verify"] == pytest.approx(400)
    assert result["stage_ms_per_round"]["plain"]["verify"] == pytest.approx(250)
    assert result["prefill_seconds"] == {"plain": 0.5, "speculative": 0.5}
    rest = {"plain": 1e3 * (4 - 2 - 1.5) / 8, "speculative": pytest.approx(1e3 * (2 - 1.2 - 1.5) / 3)}
    assert result["rest_ms_per_round"] == rest, "what is left of the requests' time"
    assert result["fallback_rounds"] == 2


@pytest.mark.parametrize(
    ("plain", "speculative", "first"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([1], [1, 2], 1), ([1], [2], 0), ([], [], None)],
)
def test_the_first_difference(plain: list[int], speculative: list[int], first: int | None) -> None:
    assert Pair("x", run(plain, 1, [1]), run(speculative, 1, [1]), "bench-0").first_difference == first


def test_the_plain_answer_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(pair.plain.recording(pair.name)) + "\n" for pair in PAIRS))
    assert read_recordings(path) == {f"bench-{i}/0": Recording(3, (1, 2, 3, 4)) for i in range(2)}


def test_a_row_shows_the_tokens_only_where_they_differ() -> None:
    same, different = (row(pair) for pair in PAIRS)
    assert same["identical"] and "token_ids" not in same["plain"]
    assert different["first_difference"] == 2
    assert different["speculative"]["token_ids"] == [1, 2, 9]


def test_histogram_bars() -> None:
    assert histogram([]) == histogram([0, 0]) == []
    zero, one, two = histogram([30, 0, 1, 0])
    assert zero.count("▇") == 30
    assert one.endswith(" 0") and "▇" not in one
    assert two.count("▇") == 1, "something that occurred is seen"


def test_the_table_shows_what_matters() -> None:
    result = summarise(PAIRS, {"plain": 4.0, "speculative": 2.0})
    result |= {"model": "tiny", "settings": {"budget": 16, "concurrency": 1}}
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as capture:
        show({**result, "synthetic_drafter": None}, console)
    for shown in ("1.75", "2.67", "400.0", "50.0%", "budget 16"):
        assert shown in capture.get()
    assert "SYNTHETIC" not in capture.get()
    with console.capture() as capture:
        show({**result, "synthetic_drafter": {"record": "r.jsonl", "acceptance_length": 5.0}}, console)
    assert "SYNTHETIC DRAFTER (record r.jsonl, acceptance_length 5.0)" in capture.get()


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"question": "b", "answer": "no"}\n{"turns": ["c", "d"]}\n', encoding="utf-8")
    assert read_prompts(path) == ["a", "b", "c"]
    assert read_prompts(path, 2) == ["a", "b"]


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"text": "a"}', '{"turns": []}', '{"prompt": ""}', '{"prompt": 3}'])
def test_a_bad_prompt_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"p\.jsonl:2"):
        read_prompts(path)


def test_our_own_prompts() -> None:
    prompts = read_prompts(PROMPTS)
    assert len(prompts) == len(set(prompts)) == 40
    assert "What is the capital of France?" in prompts
    with pytest.raises(ValueError, match="no prompts"):
        read_prompts(PROMPTS, 0)


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_running_deployment(server: str, tmp_path: Path, concurrency: int) -> None:
    out = tmp_path / "result.json"
    record = tmp_path / "record.jsonl"
    options = ["--limit", "2", "--max-tokens", "6", "--concurrency", str(concurrency), "--budget", "8"]
    options += ["--record", str(record)]
    done = CliRunner().invoke(app, ["bench", "--url", server, "--prompts", str(PROMPTS), *options, "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert "tokens/s" in done.output
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["identical"] == 1.0
    assert result["tokens"] == {"plain": 12, "speculative": 12}
    assert result["speedup"] == pytest.approx(result["speculative_tokens_per_s"] / result["plain_tokens_per_s"])
    assert 1 <= result["acceptance_length"] <= 9
    assert sum(result["acceptance_histogram"]) == result["rounds"]["speculative"]
    assert set(result["stage_seconds"]["speculative"]) == set(STAGES)
    assert result["settings"]["budget"] == 8
    assert {"cpu", "cores", "gpus"} <= set(result["machine"])
    assert {"version", "torch", "transformers", "ray", "python"} <= set(result["versions"])
    assert len(result["rows"]) == 2 and result["synthetic_drafter"] is None
    recorded = read_recordings(record)
    assert sorted(recorded) == ["bench-0/0", "bench-1/0"]
    assert all(len(r.token_ids) == 6 and r.prompt_tokens > 0 for r in recorded.values())
    assert {"command", "date", "model"} <= set(result)
