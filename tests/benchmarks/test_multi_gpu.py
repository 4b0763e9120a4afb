"""The layouts of a run on several GPUs: what they deploy, what they need, and what a result shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.multi_gpu import report
from benchmarks.multi_gpu.layouts import Layout
from ddtree.deployments.config import AppConfig, read_document
from ddtree.deployments.errors import ConfigError
from ddtree.deployments.verifier_deployment import placement

REPOSITORY = Path(__file__).parents[2]
GPU, MLA, CPU = (
    REPOSITORY / path
    for path in ("configs/smollm2-gpu.yaml", "benchmarks/multi_gpu/tiny-mla.yaml", "configs/tiny-mla-tp2-cpu.yaml")
)


def config(path: Path, layout: str) -> AppConfig:
    document = Layout.parse(layout).document(read_document(path))
    return AppConfig.parse(document["applications"][0]["args"])


@pytest.mark.parametrize(
    ("path", "layout", "gpus", "bundles"),
    [
        (GPU, "1", 1, [{"GPU": 0.74}]),
        (GPU, "1+own", 2, [{"GPU": 0.99}]),
        (MLA, "2", 2, [{"GPU": 0.74}, {"GPU": 1.0}]),
        (MLA, "4+own", 5, [{"GPU": 0.99}, {"GPU": 1.0}, {"GPU": 1.0}, {"GPU": 1.0}]),
        (CPU, "1", 0, [{"CPU": 0.01}]),
        (CPU, "2+own", 0, [{"CPU": 0.01}, {"CPU": 0.01}]),
    ],
)
def test_a_layout_has_its_places(path: Path, layout: str, gpus: int, bundles: list[dict[str, float]]) -> None:
    found = config(path, layout)
    assert found.gpus_needed == gpus
    assert placement(found)["placement_group_bundles"] == bundles
    assert str(Layout.parse(layout)) == layout


def test_a_layout_changes_nothing_else() -> None:
    source = read_document(GPU)
    before = repr(source)
    alone = Layout(1, own=True).document(source)["applications"][0]
    assert repr(source) == before
    assert alone["deployments"] == source["applications"][0]["deployments"]
    assert config(GPU, "1+own").target == config(GPU, "1").target


@pytest.mark.parametrize("text", ["", "0", "two", "2+", "2+mine", "-1"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ranks"):
        Layout.parse(text)


def test_a_layout_that_cannot_be_says_why() -> None:
    source = read_document(GPU)
    source["applications"][0]["args"]["tree"] = {"budget": -1}
    with pytest.raises(ConfigError, match=r"layout 2: .*budget"):
        Layout(2).document(source)


def test_a_result_shows_what_it_has() -> None:
    """And no overhead where rounds overlap: a difference of times that lie on each other is none."""
    window = {"streams": 4, "budget": 31, "seconds": 2.0, "rounds": 500, "tokens": 6000, "draft_seconds": 0.5}
    rounds = [
        {"transport": "mailbox", "overlap": overlap, **window, "verify_seconds": 1.0} for overlap in ("off", "on")
    ]
    result: dict[str, Any] = {
        "model": "tiny", "date": "2026-11-30", "command": "python -m benchmarks.multi_gpu", "remarks": ["cut short"],
        "machine": {"gpus": ["one", "two"]}, "gpus": None,
        "layouts": {"2+own": {"rounds": rounds, "service": {}}},
    }  # fmt: skip
    assert report.markdown(result).splitlines()[-4:] == [
        "| 2+own | mailbox | off | 4 | 31 | 4.00 | 1.00 | 2.00 | 1.00 | 25.0% | 3000 |",
        "| 2+own | mailbox | on | 4 | 31 | 4.00 | 1.00 | 2.00 | – | – | 3000 |",
        "",
        "- cut short",
    ]
