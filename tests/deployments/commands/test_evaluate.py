"""`ddtree eval-drafter`: faults before models load, one real run, and offline rounds against real ones in this process."""

from __future__ import annotations

import io
import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.in_process import LocalDrafter, Rounds
from ddtree.deployments.commands import evaluate
from ddtree.deployments.commands.evaluate import EvaluateOptions, column
from ddtree.deployments.commands.evaluate_plot import save_plot
from ddtree.deployments.commands.evaluate_view import show
from ddtree.deployments.commands.main import app
from ddtree.deployments.commands.prompts import read_prompts
from ddtree.deployments.requests import Delta, GenerationRequest, SamplingParams
from ddtree.deployments.round_loop import NOISE_SHARE
from ddtree.deployments.sequence import Sequence
from ddtree.deployments.shapes import shipped_checkpoints
from ddtree.drafter.training.evaluation import EvaluationOptions
from ddtree.drafter.training.evaluation import evaluate as measure
from ddtree.drafter.training.tallies import Cells, Tally

REPOSITORY = Path(__file__).parents[3]
PROMPTS = REPOSITORY / "tests/data/prompts.jsonl"
CONFIG = REPOSITORY / "configs/smollm2-cpu.yaml"
HORIZON = 15


def ddtree(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["eval-drafter", *arguments], env={"COLUMNS": "200"})
    return done.exit_code, done.output


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A drafter that was made for another target."""
    config = json.loads((shipped_checkpoints() / "smollm2-135m/config.json").read_text())
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/config.json").write_text(json.dumps(config | {"num_target_layers": 29}))
    return tmp_path / "foreign"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--prompts", "/nowhere.jsonl"), "/nowhere.jsonl"),
        ((), "--prompts FILE.jsonl"),
        (("--prompts", str(PROMPTS), "--prompts", "/other/prompts.jsonl"), "two prompt files are named prompts"),
        (("--prompts", str(PROMPTS), "--budgets", "8,0"), "a tree of 0 nodes"),
        (("--prompts", str(PROMPTS), "--budgets", "2000"), "from 1 to 1023"),
        (("--prompts", str(PROMPTS), "--detail", "9"), "--detail 9 is none of the budgets 8, 16, 32, 63, 255"),
        (("--prompts", str(PROMPTS), "--json", "/nowhere/out.json"), "no folder /nowhere"),
        (("--prompts", str(PROMPTS), "--plot", "out.jpeg"), "plots are PNG files"),
        (("--prompts", str(PROMPTS), "--drafter", "nobody"), "neither a shipped checkpoint"),
        (("--prompts", str(PROMPTS), "--target", "/nowhere"), "/nowhere"),
        (("/nowhere.yaml", "--prompts", str(PROMPTS)), "/nowhere.yaml"),
        (("--prompts", str(PROMPTS), "--tokens", "3000", "--device", "cpu"), "into 2048 tokens"),
    ],
)
def test_a_fault_is_one_sentence(arguments: tuple[str, ...], words: str, target_dir: Path) -> None:
    code, text = ddtree(*arguments)
    assert code == 1
    assert "error: " in text and words in text
    assert "Traceback" not in text
    assert "loading the target" not in text


def test_a_drafter_of_another_target_is_refused(foreign: Path, target_dir: Path) -> None:
    code, text = ddtree("--prompts", str(PROMPTS), "--drafter", str(foreign))
    assert code == 1
    assert "drafter made for another target" in text and "number of layers 29 (the target's is 30)" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"checkpoint": None}, "name a drafter with --drafter"),
        ({"weights": "random"}, "say nothing"),
        ({"dtpe": "auto"}, "unknown key 'drafter.dtpe'"),
    ],
)
def test_a_configuration_that_cannot_be_measured(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    args = {"target": {"model": "smollm2-135m-instruct"}, "drafter": changes}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"applications": [{"args": args}]}))
    code, text = ddtree(str(tmp_path / "config.yaml"), "--prompts", str(PROMPTS))
    assert code == 1 and words in text


def test_budgets_are_numbers() -> None:
    code, text = ddtree("--prompts", str(PROMPTS), "--budgets", "8,many")
    assert code == 2 and "is no list of numbers of nodes" in text


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'ddtree-serve\[train\]'"):
        evaluate.run(EvaluateOptions(prompts=[PROMPTS], plot=Path("out.png")), lambda stage, done, line: None)


def test_a_real_run(tmp_path: Path, target_dir: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    code, text = ddtree(
        *(
            str(CONFIG),
            "--prompts",
            str(PROMPTS),
            "--limit",
            "2",
            "--tokens",
            "12",
            "--budgets",
            "16,8",
            "--threads",
            "1",
        ),
        *("--dtype", "float32", "--top-k", "31", "--preceding", "20", "--json", str(out), "--plot", str(plot)),
    )
    assert code == 0, text
    assert "tree 16" in text and "calibration" in text and "2 of 2 answers" in text
    assert "after 20 tokens of other prompts" in " ".join(text.split())
    assert plot.read_bytes().startswith(b"\x89PNG")
    result = json.loads(out.read_text())
    assert (result["target"], result["drafter"]) == ("smollm2-135m-instruct", "smollm2-135m")
    assert result["settings"]["budgets"] == [8, 16] and result["settings"]["noise_share"] == 0
    assert [result["settings"][name] for name in ("tokens", "top_k", "preceding", "limit")] == [12, 31, 20, 2]
    found = result["sets"]["prompts"]
    assert found == result["all"] and (found["prompts"], found["left_out"]) == (2, 0)
    lengths = [found["columns"][name]["acceptance_length"] for name in ("chain", "8", "16")]
    assert lengths[0] > 1 and max(lengths) <= HORIZON + 1
    for figures in found["columns"].values():
        assert sum(figures["histogram"]) == figures["rounds"] and len(figures["histogram"]) == HORIZON + 1
        nodes = sum(cell["nodes"] for cell in figures["calibration"])
        assert nodes == sum(cell["nodes"] for depth in figures["calibration_by_depth"] for cell in depth["cells"])


def some_tally() -> Tally:
    tally = Tally.empty(3, Cells((0.5,), 2))
    tally.add(2, [(0, -0.1, True), (0, -3.0, False), (1, -0.2, True), (2, -1.0, False)], 9)
    tally.add(0, [(0, -0.3, False)], 9)
    return tally


def test_figures_of_a_column() -> None:
    figures = column(some_tally())
    assert figures["rounds"] == 2 and figures["acceptance_length"] == 2.0 and figures["histogram"] == [1, 0, 1, 0]
    assert [(row["depth"], row["reached"], row["accepted"]) for row in figures["by_depth"]] == [
        (1, 2, 0.5),
        (2, 1, 1.0),
        (3, 1, 0.0),
    ]
    assert [(cell["above"], cell["to"], cell["nodes"]) for cell in figures["calibration"]] == [
        (0.0, 0.5, 2),
        (0.5, 1.0, 3),
    ]
    assert [row["and_deeper"] for row in figures["calibration_by_depth"]] == [False, True]


def test_the_view_shows_each_set_if_asked(tmp_path: Path) -> None:
    found = {"prompts": 1, "left_out": 1, "columns": {"chain": column(some_tally()), "8": column(some_tally())}}
    nothing = column(Tally.empty(3, Cells((0.5,), 2)))
    none = {"prompts": 0, "left_out": 2, "columns": {"chain": nothing, "8": nothing}}
    settings = {
        "budgets": [8],
        "detail": 8,
        "temperature": 1.0,
        "noise_share": 0.65,
        "tokens": 9,
        "top_k": 32,
        "preceding": 4,
    }
    result = {
        "target": "t", "drafter": "d", "settings": settings | {"device": "cpu", "dtype": "float32"},
        "sets": {"one": found, "two": found, "none": none}, "all": found, "seconds": {"answers": 1.0, "rounds": 2.0},
    }  # fmt: skip
    shown = []
    for per_set in (False, True):
        out = io.StringIO()
        show(result, Console(file=out, width=120), per_set)
        shown.append(out.getvalue())
    assert "temperature 1, candidates ranked with 0.65 of the noise, after 4 tokens of other prompts" in shown[0]
    assert ["one: calibration" in text for text in shown] == [False, True]
    save_plot(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


class CountingRounds(Rounds[LocalDrafter]):
    """Knows how many tokens each round gave; the first one of an answer comes of its prompt."""

    def __init__(self) -> None:
        self.gained: dict[str, list[int]] = {}
        super().__init__(1, LocalDrafter, torch.float32)

    def _emit(self, outgoing: list[tuple[Sequence, Delta | Exception]]) -> None:
        super()._emit(outgoing)
        for sequence, delta in outgoing:
            assert isinstance(delta, Delta) and delta.finish_reason != "stop", "these answers are longer"
            self.gained.setdefault(sequence.id, []).append(len(delta.token_ids))


def test_offline_rounds_are_the_real_ones(target_dir: Path) -> None:
    """In fp32 every round that begins within the first tokens accepts as many, greedy and sampled."""
    tokens, budget, prompts, temperatures = 10, 16, read_prompts(PROMPTS, 3)[1:], (0.0, 1.0)
    real = CountingRounds()
    for temperature in temperatures:
        for i, prompt in enumerate(prompts):
            sampling, name = SamplingParams(temperature=temperature, seed=5 + i), f"{temperature} {i}"
            more = tokens + HORIZON + 1
            real.add(GenerationRequest(name, real.chat(prompt), more, real.stop, sampling, budget=budget))
    while real.loop.run():
        pass
    for temperature in temperatures:
        options = EvaluationOptions(
            target_dir=target_dir,
            drafter_dir=shipped_checkpoints() / "smollm2-135m",
            budgets=(budget,),
            tokens=tokens,
            temperature=temperature,
            noise_share=NOISE_SHARE if temperature else 0.0,
            seed=5,
            top_k=64,
        )
        found = measure(options, {"prompts": prompts}).overall.columns[str(budget)]
        histogram = [0] * (HORIZON + 1)
        for gained in (real.gained[f"{temperature} {i}"][1:] for i in range(len(prompts))):
            for at, count in zip(accumulate(gained, initial=0), gained, strict=False):
                histogram[count - 1] += at < tokens
        assert found.histogram.tolist() == histogram
