"""The elastic run's parts without a service: what it deploys, what it counts in which second and phase, and when it fails."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.findings import speed
from benchmarks.chaos.streams import Ask, Crowd, Stream
from benchmarks.elastic import plot, report
from benchmarks.elastic.drafters import DASHBOARD, Drafters, with_drafters
from benchmarks.elastic.findings import COUNTS, Phase, answers, passed, per_phase, throughput
from benchmarks.elastic.tokens import Counted, Counts, Meter
from benchmarks.serving.service import Failed
from ddtree.deployments.commands.machine import Machine
from ddtree.deployments.commands.plan import PlanOptions, make_plan
from ddtree.deployments.config import load, read_document
from ddtree.deployments.pods import count
from ddtree.deployments.verifier_deployment import placement

REPOSITORY = Path(__file__).parents[2]
CPU, GPU = (REPOSITORY / f"benchmarks/elastic/smollm2-{device}.yaml" for device in ("cpu", "gpu"))
ASK = Ask("Count.", 4)


def stream(token_ids: list[int], times: list[float], **changes: Any) -> Stream:
    text = "".join(f"{token} " for token in token_ids)
    whole = {"text": text, "completion_tokens": len(token_ids), "finish_reason": "length"}
    return Stream(ASK, times, token_ids=token_ids, **{**whole, **changes})


RIGHT = stream([1, 2, 3, 4], [10.0, 10.1, 10.5, 12.2, 12.2])
WRONG = stream([1, 2, 9, 4], [10.0, 10.0, 10.9, 11.0, 12.0, 13.5, 13.5])


COUNTED: Counts = [(10.0, 0), (11.0, 3), (12.0, 4), (13.0, 4), (13.5, 8), (14.5, 9)]


def test_tokens_of_a_second_are_those_that_came_in_it() -> None:
    assert throughput(COUNTED, 10.0, 14.9) == [3.0, 1.0, 0.0, 4.5]
    assert throughput(COUNTED, 10.5, 12.4) == [2.0], "whole seconds alone"
    assert throughput(COUNTED, 10.0, 10.9) == []


def test_tokens_are_counted_while_answers_are_under_way() -> None:
    asked = Counted("Count.", 4, seed=7)
    assert asked.body() == Ask("Count.", 4, seed=7).body() | {
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}
    }
    crowd = Crowd("http://127.0.0.1:1", [asked], 1)  # nobody asks
    begun = Stream(asked, [0.0])
    begun.take({"choices": [], "usage": {"completion_tokens": 3}})
    crowd.streams += [RIGHT, begun]
    with Meter(crowd) as meter:
        until = time.monotonic() + 10
        while len(meter.counts) < 2 and time.monotonic() < until:
            time.sleep(0.01)
    assert [tokens for _, tokens in meter.counts[:2]] == [0, 7]


def phases() -> list[Phase]:
    """One that was reached at once, one that was not at once, and one that was not."""
    before, between, after = (dict.fromkeys(COUNTS, n) | {"drafters": []} for n in (5, 7, 10))
    return [
        Phase(1, 10.0, before, between, reached=10.0, ended=11.0),
        Phase(4, 11.0, between, after, reached=12.0, ended=14.0),
        Phase(1, 14.0, after),
    ]


def test_a_phase_has_what_came_in_it() -> None:
    first, second = per_phase(phases(), [(9.0, 1), (11.5, 3), (11.9, 4)], COUNTED, [RIGHT, WRONG], begin=10.0)
    assert (first["tokens_per_s"], first["changing_tokens_per_s"], first["moves"]) == (3.0, None, 2)
    assert (second["tokens_per_s"], second["changing_tokens_per_s"], second["moves"]) == (2.25, 1.0, 3)
    assert (second["asked_s"], second["reached_s"], second["ended_s"]) == (1.0, 2.0, 4.0)
    assert first["still_s"] == pytest.approx(1.7), "a part of it was in this phase"
    assert first["held"] and second["held"]


@pytest.mark.parametrize(("seen", "held"), [((12.5, 3), False), ((12.5, 4), True), ((14.5, 1), True)])
def test_a_phase_is_held_while_its_drafters_stay(seen: tuple[float, int], held: bool) -> None:
    _, second = per_phase(phases(), [(11.9, 4), seen], COUNTED, [RIGHT], begin=10.0)
    assert second["held"] is held


def test_answers_that_differ_count_as_changed_in_float32_only() -> None:
    cut = stream([1], [10.0], finish_reason=None)
    exact, loose = (answers([RIGHT, WRONG, cut], {ASK: RIGHT}, exact) for exact in (True, False))
    assert exact["changed"][0]["first_difference"] == 2 and loose["changed"] is None
    assert exact["identical"] == loose["identical"] == 0.5 and exact["cut"] == 1
    assert answers([cut], {ASK: RIGHT}, True)["identical"] is None


def outcome(streams: list[Stream], exact: bool = True, wanted: tuple[int, ...] = (1, 4), **more: Any) -> dict[str, Any]:
    seen = more.pop("seen", [(10.0, 1), (11.5, 4)])
    found = {
        "name": "tiny", "model": "m", "command": "c", "date": "2026-01-01T00:00:00", "machine": asdict(Machine.read()),
        "settings": {"streams": 2, "drafters": [*wanted]}, "reference": speed([RIGHT], 10.0),
        "load": speed(streams, 10.0) | answers(streams, {ASK: RIGHT}, exact),
        "throughput": throughput(COUNTED, 10.0, 14.0), "drafters": [(at - 10.0, number) for at, number in seen],
        "phases": per_phase(phases(), seen, COUNTED, streams, 10.0), "remarks": [],
    } | more  # fmt: skip
    return found | {"passed": passed(found)}


FAILED = stream([], [10.0], completion_tokens=0, finish_reason=None, error="500")


@pytest.mark.parametrize(
    ("found", "right"),
    [
        (outcome([RIGHT]), True),
        (outcome([RIGHT, WRONG]), False),
        (outcome([RIGHT, WRONG], exact=False), True),
        (outcome([RIGHT, FAILED], exact=False), False),
        (outcome([RIGHT], wanted=(1, 4, 1)), False),
        (outcome([RIGHT], seen=[(10.0, 1), (11.5, 4), (13.0, 3)]), False),
        (outcome([RIGHT], remarks=["CutShort: ended by SIGALRM"]), False),
        (outcome([RIGHT], load={}, phases=[], wanted=()), False),
    ],
)
def test_a_run_passes_where_all_was_reached_and_nobody_noticed(found: dict[str, Any], right: bool) -> None:
    assert found["passed"] is right


def test_what_a_run_found_is_written(tmp_path: Path) -> None:
    seen = [(10.0, 1), (11.5, 4), (13.0, 3)]
    result = outcome([RIGHT, WRONG, FAILED], wanted=(1, 4, 1), seen=seen, remarks=["cut short"])
    report.write(result, tmp_path)
    plot.draw(result, tmp_path)
    assert json.loads((tmp_path / "elastic-tiny.json").read_text())["throughput"] == [3.0, 1.0, 0.0, 4.5]
    text = (tmp_path / "elastic-tiny.md").read_text()
    for words in (
        "2 of 3 phases, 2 streams at a time, 3 in all",
        "**1 failed, 1 changed**",
        "failed: 500",
        "from token 2 on",
        "the 4 drafters of 2 s to 4 s did not all stay",
        "cut short",
        "| 4 | 1.0 | 1.0 | 1.0 | 2.2 | 1.0 | 1.7 | 3 | 3 | 3 |",
    ):
        assert words in text
    assert (tmp_path / "elastic-tiny.png").stat().st_size > 0
    assert "1 failed, 50.0% as in the reference" in report.markdown(outcome([RIGHT, WRONG, FAILED], exact=False))


def test_a_run_that_never_came_to_the_load_is_written(tmp_path: Path) -> None:
    result = outcome([], load={}, throughput=[], drafters=[], phases=[], remarks=["Failed: no service"])
    report.write(result, tmp_path)
    plot.draw(result, tmp_path)
    assert "Failed: no service" in (tmp_path / "elastic-tiny.md").read_text()
    assert not (tmp_path / "elastic-tiny.png").exists()


def test_another_number_changes_nothing_else() -> None:
    scaled = {"name": "Drafter", "autoscaling_config": {"max_replicas": 3}, "max_ongoing_requests": 7}
    ingress = {"name": "Ingress", "num_replicas": 2}
    document = {"proxy_location": "HeadOnly", "applications": [{"name": "ddtree", "deployments": [scaled, ingress]}]}
    wanted = {"name": "Drafter", "num_replicas": 4, "max_ongoing_requests": 7}
    application = {"name": "ddtree", "deployments": [wanted, ingress]}
    assert with_drafters(document, 4) == document | {"applications": [application]}
    assert scaled["autoscaling_config"], "the document that was given stays as it is"
    assert with_drafters({"applications": [{}]}, 2)["applications"][0]["deployments"] == [
        {"name": "Drafter", "num_replicas": 2}
    ]


def test_the_dashboard_is_where_ray_says() -> None:
    said = "Started a local Ray instance. View the dashboard at \x1b[1m\x1b[32mhttp://127.0.0.1:8266 \x1b[39m\x1b[22m"
    found = DASHBOARD.search(said)
    assert found and found[1] == "http://127.0.0.1:8266"


def test_a_service_without_a_dashboard_says_so(tmp_path: Path) -> None:
    log = tmp_path / "service.log"
    log.write_text("Started a local Ray instance.\n")
    with pytest.raises(Failed, match="no dashboard"):
        Drafters("http://127.0.0.1:8000", read_document(CPU), log)


def test_four_drafters_fit_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    config, plan = load(GPU), make_plan(GPU, PlanOptions())
    assert plan.fits and config.hardware.gpus == 2
    (verifier,) = placement(config)["placement_group_bundles"]
    assert verifier["GPU"] + config.drafter.num_gpus < 1, "the router has the rest, and there is room for one drafter"
    assert 3 * config.drafter.num_gpus <= 1, "the others share the second GPU"
    shared = plan.memory.loads[0]
    own = sum(size for name, size in shared.fixed.items() if name.startswith("drafter"))
    own += config.verifier.kv_tokens * (shared.per_token - plan.memory.kv_bytes_per_token)
    assert plan.gpu and own <= config.drafter.num_gpus * plan.gpu.memory


def test_answers_on_a_cpu_are_compared_and_drafts_are_always_made() -> None:
    config = load(CPU)
    assert config.target.dtype == config.drafter.dtype == "float32" and config.tree.budget != "auto"
    assert count(read_document(CPU), str(CPU)) == 1
