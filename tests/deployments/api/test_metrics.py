"""What `/metrics` says of a round loop over a real target, against the figures of each request; and the dashboard over it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ddtree.deployments.api.metrics import render
from ddtree.deployments.metrics import Metrics, Snapshot, Totals
from ddtree.deployments.sequence import Sequence

from ...conftest import REPOSITORY
from ..tiny import HORIZON, Engine, Guesser, LocalVerifier, make_target, plain, request

COUNTED = [
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
]
TIMED = [
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
]

Samples = Mapping[tuple[str, str], float]


def read(text: str, pod: int = 0) -> Samples:
    """The samples of a pod by name and the value of the label that they have beside model and engine, or ""."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            if labels.pop("engine") == str(pod):
                found[sample.name, "".join(labels.values())] = sample.value
    return found


def scrape(engine: Engine) -> Samples:
    return read(render([snapshot(engine)], "tiny", 16)[0].decode())


def snapshot(engine: Engine, pod: int = 0) -> Snapshot:
    pages = engine.scheduler.pages
    return Snapshot(
        pod=pod,
        verifier_connected=True,
        running=len(engine.scheduler.running),
        waiting=len(engine.scheduler.waiting),
        kv_usage=1 - pages.free_pages / pages.pages,
        drafters=len(engine.loop.drafters),
        horizon=HORIZON,
        preemptions=engine.scheduler.preemptions,
        totals=engine.loop.totals,
        metrics=engine.loop.metrics.copy(),
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Sequence], Samples, Samples]:
    """Three requests, the last a plain one that finds the first one's rows: their sequences, and scrapes of the middle and
    of the end."""
    verifier = LocalVerifier(make_target(tmp_path_factory.mktemp("target")))
    asked = [
        request("a", list(range(30)), 20, 15),
        request("b", [3, 1, 4], 14, 7),
        request("c", [*range(30), 5], 5, 0),
    ]
    engine = Engine(verifier)
    answers = {r.request_id: [*r.prompt_ids, *plain(verifier, r)] for r in asked}
    engine.loop.add_drafter(Guesser("d", answers, 0, errs=0.2))
    sequences = [engine.add(r) for r in asked[:2]]
    for _ in range(3):
        engine.loop.run()
    middle = scrape(engine)
    engine.run()
    sequences.append(engine.add(asked[2]))
    engine.run()
    return sequences, middle, scrape(engine)


def test_counters_are_the_sums_over_requests(served: tuple[list[Sequence], Samples, Samples]) -> None:
    sequences, _, found = served
    stats = [sequence.stats for sequence in sequences]
    drafts = found["vllm:spec_decode_num_drafts_total", ""]
    accepted = found["vllm:spec_decode_num_accepted_tokens_total", ""]
    assert accepted == sum(s.accepted_tokens for s in stats) > 10
    assert found["vllm:spec_decode_num_draft_tokens_total", ""] == sum(s.drafted_tokens for s in stats)
    by_depth = [found["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(depth)] for depth in range(HORIZON)]
    assert sum(by_depth) == accepted
    assert by_depth == sorted(by_depth, reverse=True) and by_depth[0] <= drafts
    assert found["ddtree:tree_size_count", ""] == sum(s.rounds for s in stats)
    assert found["ddtree:tree_size_count", ""] - found["ddtree:tree_size_bucket", "0.0"] == drafts
    assert found["ddtree:tree_size_sum", ""] == sum(s.drafted_tokens for s in stats)
    assert found["ddtree:acceptance_length_sum", ""] == accepted + drafts
    assert found["ddtree:acceptance_length_count", ""] == drafts
    assert found["vllm:prompt_tokens_total", ""] == 30 + 3 + 31
    assert found["vllm:generation_tokens_total", ""] == 20 + 14 + 5
    assert found["vllm:prefix_cache_queries_total", ""] == 30 + 3 + 31
    assert found["vllm:prefix_cache_hits_total", ""] == stats[2].cached_tokens > 0
    for stage in stats[0].stage_seconds:
        assert found["ddtree:stage_seconds_total", stage] > 0


def test_every_request_is_in_each_histogram_once(served: tuple[list[Sequence], Samples, Samples]) -> None:
    sequences, _, found = served
    for name in set(TIMED) - {"vllm:inter_token_latency_seconds"}:
        assert found[f"{name}_count", ""] == found[f"{name}_bucket", "+Inf"] == 3
    rounds = sum(sequence.stats.rounds for sequence in sequences)
    assert found["vllm:inter_token_latency_seconds_count", ""] == rounds, "every decoding round brings tokens"
    first, queue, prefill = (
        found[f"vllm:{name}_seconds_sum", ""]
        for name in ("time_to_first_token", "request_queue_time", "request_prefill_time")
    )
    assert first == pytest.approx(queue + prefill)
    between = found["vllm:inter_token_latency_seconds_sum", ""]
    assert found["vllm:e2e_request_latency_seconds_sum", ""] == pytest.approx(first + between)


def test_gauges_are_of_the_moment(served: tuple[list[Sequence], Samples, Samples]) -> None:
    _, middle, end = served
    assert middle["vllm:num_requests_running", ""] == 2 and end["vllm:num_requests_running", ""] == 0
    assert middle["vllm:kv_cache_usage_perc", ""] > 0 and end["vllm:kv_cache_usage_perc", ""] == 0
    assert end["ddtree:drafters", ""] == 1


def test_names_are_there_and_the_dashboard_uses_no_others(served: tuple[list[Sequence], Samples, Samples]) -> None:
    names = {name for name, _ in served[2]}
    assert names >= {*COUNTED, *(f"{name}_bucket" for name in TIMED)}
    board = json.loads((REPOSITORY / "docs/grafana-dashboard.json").read_text())
    shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    used = {name for expression in shown for name in re.findall(r"(?:vllm|ddtree):\w+", expression)}
    assert used <= names
    ours = {re.sub("_(bucket|sum|count)$", "", name) for name in names if name.startswith("ddtree:")}
    assert ours <= {re.sub("_(bucket|sum|count)$", "", name) for name in used}, "a figure of ours that no panel shows"


def test_a_scrape_shows_every_pod() -> None:
    pods = [
        Snapshot(pod, True, 0, 0, pod / 4, pod, HORIZON, 0, Totals(rounds=10 + pod), Metrics(prefix_cache=True))
        for pod in (0, 1)
    ]
    text = render(pods, "tiny", 16)[0].decode()
    for pod in (0, 1):
        found = read(text, pod)
        assert (found["ddtree:rounds_total", ""], found["ddtree:drafters", ""]) == (10 + pod, pod)
        assert found["vllm:kv_cache_usage_perc", ""] == pod / 4
    assert text.count("# TYPE ddtree:rounds_total") == 1


def test_the_scraper_chooses_the_format() -> None:
    pod = Snapshot(0, False, 0, 0, 0.0, 0, 0, 0, Totals(), Metrics(prefix_cache=False))
    assert render([pod], "tiny", 0)[1].startswith("text/plain; version=0.0.4")
    body, content_type = render([pod], "tiny", 0, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text") and body.endswith(b"# EOF\n")
