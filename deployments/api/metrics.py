"""The routers' snapshots in Prometheus' text format. Names, types and labels are vLLM's where vLLM has the figure, so that its
dashboards and its benchmark read them; the rest is under `ddtree:`. Holds no state: every scrape writes what the routers say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ddtree.deployments.metrics import Histogram, Snapshot

TREE_SIZES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1023)
ACCEPTANCE_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)


def render(pods: Sequence[Snapshot], model: str, budget: int, accept: str = "") -> tuple[bytes, str]:
    """Return the body and its content type, in the format that the `accept` header asks for.

    Args:
        pods: at least one.
        model: the served name.
        budget: nodes besides the root of a tree, where a request does not say; the most of them where that varies.
    """
    registry = CollectorRegistry()  # of our own: the default one holds what others in this process put there
    registry.register(Pods(pods, model, budget))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class Pods(Collector):
    """Every metric, with a sample of each pod."""

    def __init__(self, pods: Sequence[Snapshot], model: str, budget: int) -> None:
        self._pods = [_Pod(snapshot, model, budget) for snapshot in pods]

    def collect(self) -> Iterator[Metric]:
        for first, *others in zip(*(pod.families() for pod in self._pods), strict=True):
            first.samples += [sample for other in others for sample in other.samples]
            yield first


class _Pod:
    def __init__(self, snapshot: Snapshot, model: str, budget: int) -> None:
        self._snapshot, self._budget = snapshot, budget
        self._labels = {"model_name": model, "engine": str(snapshot.pod)}  # a pod is what vLLM calls an engine

    def families(self) -> Iterator[Metric]:
        now, totals, metrics = self._snapshot, self._snapshot.totals, self._snapshot.metrics
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        yield gauge("vllm:num_requests_running", "Sequences in the batch.", now.running)
        yield gauge("vllm:num_requests_waiting", "Requests in the queue.", now.waiting)
        yield gauge("vllm:kv_cache_usage_perc", "Part of the KV pages in use; 1 is all of them.", now.kv_usage)
        yield counter(
            "vllm:prompt_tokens", "Prompt tokens of requests that have their first token.", metrics.prompt_tokens
        )
        yield counter("vllm:generation_tokens", "Tokens generated.", totals.generated_tokens)
        yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", metrics.looked_up_tokens)
        yield counter("vllm:prefix_cache_hits", "Prompt tokens whose KV rows were kept.", metrics.cached_tokens)
        yield counter("vllm:spec_decode_num_drafts", "Drafted trees verified.", sum(metrics.accepted.values()))
        yield counter("vllm:spec_decode_num_draft_tokens", "Their nodes besides the roots.", totals.drafted_tokens)
        yield counter("vllm:spec_decode_num_accepted_tokens", "Nodes on accepted paths.", totals.accepted_tokens)
        name, reached = "vllm:spec_decode_num_accepted_tokens_per_pos", sorted(metrics.accepted.items())
        by_depth = {str(d): sum(trees for length, trees in reached if length > d) for d in range(now.horizon)}
        yield counter(name, "Accepted nodes by depth, from 0.", by_depth, "position")
        yield histogram(
            "vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", metrics.first_token
        )
        yield histogram(
            "vllm:inter_token_latency_seconds", "Between two rounds that bring tokens.", metrics.next_tokens
        )
        yield histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.", metrics.request)
        yield histogram("vllm:request_queue_time_seconds", "From arrival to the first step.", metrics.queue)
        yield histogram("vllm:request_prefill_time_seconds", "From the first step to the first token.", metrics.prefill)
        yield gauge(
            "ddtree:verifier_connected", "1 while there is a verifier whose target is loaded.", now.verifier_connected
        )
        yield gauge("ddtree:drafters", "Drafters that draft.", now.drafters)
        yield gauge(
            "ddtree:budget", "Most nodes besides the root of a tree, where the request does not say.", self._budget
        )
        yield counter("ddtree:rounds", "Rounds.", totals.rounds)
        yield counter("ddtree:stage_seconds", "Time the rounds took, by stage.", metrics.stage_seconds, "stage")
        sizes = _histogram(TREE_SIZES, metrics.tree_sizes.items())
        yield histogram("ddtree:tree_size", "Nodes besides the root, of every verified tree.", sizes)
        lengths = _histogram(ACCEPTANCE_LENGTHS, ((1 + length, trees) for length, trees in reached))
        yield histogram(
            "ddtree:acceptance_length", "Tokens gained by a drafted tree, the bonus token included.", lengths
        )
        name, text = "ddtree:forecast_tokens", "Draft tokens that trees of varying size were expected to have accepted."
        yield counter(name, text, totals.forecast_tokens)
        yield counter("ddtree:forecast_accepted_tokens", "Those that were accepted of these.", totals.forecast_accepted)
        yield counter("ddtree:fallbacks", "Trees that wanted a draft and had none.", totals.fallbacks)
        yield counter("ddtree:drafter_moves", "Running sequences given to another drafter.", totals.moves)
        yield counter("ddtree:preemptions", "Sequences that gave up their pages for an older one.", now.preemptions)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), float(value))
        return family

    def _counter(self, name: str, text: str, value: float | Mapping[str, float], label: str | None = None) -> Metric:
        """`value` is a mapping by the values of `label` where there is one."""
        family = CounterMetricFamily(name, text, labels=[*self._labels, *([label] if label else [])])
        for key, part in value.items() if isinstance(value, Mapping) else [("", value)]:
            family.add_metric([*self._labels.values(), *([key] if label else [])], part)
        return family

    def _histogram(self, name: str, text: str, values: Histogram) -> Metric:
        bounds = [*map(floatToGoString, values.bounds), "+Inf"]
        family = HistogramMetricFamily(name, text, labels=list(self._labels))
        buckets = list(zip(bounds, map(float, accumulate(values.counts)), strict=True))
        family.add_metric(list(self._labels.values()), buckets, values.sum)
        return family


def _histogram(bounds: tuple[float, ...], counts: Iterable[tuple[int, int]]) -> Histogram:
    """Of values that were counted one by one, as (value, how often)."""
    out = Histogram(bounds)
    for value, times in counts:
        out.observe(value, times)
    return out
