"""Prometheus metrics under SGLang's names, in a registry of this server's own.

Gauges are read from memory that the processes share, at the moment of the scrape. Counters of
engine requests are updated when a request ends, counters of HTTP requests by the ASGI application.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import Scope

from runtime.client.recorder import RequestRecord
from runtime.errors import InvalidRequest
from runtime.processes.status import ReplicaStatus
from runtime.service.context import ServiceContext
from server.adapter_metrics import AdapterCollector
from server.loop_lag import measure
from server.metric_aliases import VllmAliases

_TTFT = (*(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400),)
_E2E = (*_TTFT, 600, 1200, 1800, 2400)
_ITL = (
    *(0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040, 0.060, 0.080),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
_QUEUE = (
    *(0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, *range(20, 100, 10)),
    *(*range(100, 1000, 100), 1000, 1200, 1400, 1600, 1800, 2000, 2500, 3000),
)
# Buckets from 1 ms to 10 s.
_LAG = (*(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),)
_STAGE = tuple(0.001 * 1.62**power for power in range(30))
_TOKENS = (
    *(100, 300, 500, 700, 1000, 1500, *range(2000, 10001, 1000), 12500, 15000, 17500, 20000),
    *(22500, 25000, 27500, 30000, 35000, 40000, 60000, 80000, 100000, 200000),
)
_REFERENCE_PREFIX = "sglang:"
_PREFIX = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}_")
# Prometheus' rules forbid a metric's type in its name. Under another prefix than SGLang's, these
# metrics have the names that vLLM gives them.
_WITHOUT_TYPE = {
    "prompt_tokens_histogram": "request_prompt_tokens",
    "generation_tokens_histogram": "request_generation_tokens",
}
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"})
_SHARED_GAUGES = {
    "num_running_reqs": "Requests in the running batch.",
    "num_queue_reqs": "Requests that wait in the queue.",
    "num_retracted_reqs": "Retracted requests: put back into the queue, waiting to be recomputed.",
    "num_used_tokens": "Tokens of the KV pool in use by running requests.",
    "max_total_num_tokens": "Capacity of the KV pool in tokens.",
    "gen_throughput": "Generated tokens per second.",
    "decode_sum_seq_lens": "Sum of the lengths of all running sequences, in tokens.",
    "engine_load_weights_time": "Seconds that loading the weights took.",
    "image_cache_bytes": "Bytes of image embeddings in the image cache.",
    "hicache_host_used_tokens": "Tokens that host memory keeps for the prefix cache.",
    "hicache_host_total_tokens": "Most tokens that host memory keeps for the prefix cache.",
}
_SHARED_COUNTERS = {
    "evicted_tokens_total": "Tokens evicted from the prefix cache.",
    "load_back_tokens_total": "Tokens that came back from host memory to the KV pool.",
    "prefetched_tokens_total": "Tokens that came back from files to host memory.",
    "backuped_tokens_total": "Tokens whose pages were written to files.",
    "images_computed_total": "Images that the model's vision tower computed.",
    "image_cache_hits_total": "Images of prompts whose embeddings were in the image cache.",
    "num_nan_requests_total": "Requests that failed because the model computed NaN for them.",
    "num_retractions_total": "Retractions: times that a request was put back into the queue.",
}


class Metrics:
    """The server's metrics and their registry."""

    def __init__(self, context: ServiceContext) -> None:
        """Register all metrics, labelled with the served model's name."""
        # Dashboards do not read creation times, which would be a third of the page.
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self._labels = {
            "model_name": context.config.model.served_model_name or "",
            "engine_type": "unified",
        }
        self.registry.register(_EngineCollector(context, self._labels))
        if context.client.adapters.is_enabled:
            self.registry.register(AdapterCollector(context, self._labels))
        if "vllm" in context.config.logging.metrics_aliases:
            self.registry.register(VllmAliases(context))
        self._prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens.")
        self._generation_tokens = self._counter("generation_tokens_total", "Generated tokens.")
        self._cached_tokens = self._counter(
            "cached_tokens_total", "Prompt tokens found in the prefix cache.", "cache_source"
        )
        self._requests = self._counter("num_requests_total", "Requests that ended.")
        self._structured = self._counter(
            "num_so_requests_total", "Requests whose output had to follow a grammar."
        )
        self._aborted = self._counter("num_aborted_requests_total", "Requests that were aborted.")
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Seconds to the first token.", _TTFT
        )
        self._itl = self._histogram("inter_token_latency_seconds", "Seconds between tokens.", _ITL)
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "Seconds from a request's arrival to its end.", _E2E
        )
        self._queue = self._histogram(
            "queue_time_seconds", "Seconds from arrival to the first prompt step.", _QUEUE
        )
        self._stages = Histogram(
            "sglang:per_stage_req_latency_seconds",
            "Seconds of each stage: prefill_waiting, prefill_forward, decode_loop.",
            [*self._labels, "stage"],
            registry=self.registry,
            buckets=_STAGE,
        )
        self._time_per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean seconds per output token of a request.",
            _ITL,
        )
        self._prompt_sizes = self._histogram("prompt_tokens_histogram", "Prompt tokens.", _TOKENS)
        self._output_sizes = self._histogram(
            "generation_tokens_histogram", "Generated tokens.", _TOKENS
        )
        self._pauses = self._histogram(
            "resume_pause_seconds", "Seconds in which a resumed request had no process.", _E2E
        )
        context.client.outgoing.on_pause = self._pauses.observe
        self._loop_lag = self._histogram(
            "event_loop_lag_seconds",
            "Seconds by which the front's event loop is late; measured ten times a second.",
            _LAG,
        )
        self._http_requests = self._counter(
            "http_requests_total", "HTTP requests.", "endpoint", "method"
        )
        self._http_responses = self._counter(
            "http_responses_total", "HTTP responses.", "endpoint", "status_code", "method"
        )
        self._http_active = Gauge(
            "sglang:http_requests_active",
            "HTTP requests in progress.",
            list(self._labels),
            registry=self.registry,
        ).labels(**self._labels)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        counter = Counter(f"sglang:{name}", text, [*self._labels, *labels], registry=self.registry)
        if not labels:
            counter.labels(**self._labels)
        return counter

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"sglang:{name}", text, list(self._labels), registry=self.registry, buckets=buckets
        )
        return histogram.labels(**self._labels)

    def on_record(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        labels = self._labels
        self._requests.labels(**labels).inc()
        if record.sampling.grammar is not None:
            self._structured.labels(**labels).inc()
        if record.outcome in ("abort", "disconnect"):
            self._aborted.labels(**labels).inc()
        self._prompt_tokens.labels(**labels).inc(record.prompt_tokens)
        self._generation_tokens.labels(**labels).inc(record.completion_tokens)
        self._cached_tokens.labels(**labels, cache_source="device").inc(record.cached_tokens)
        self._prompt_sizes.observe(record.prompt_tokens)
        self._output_sizes.observe(record.completion_tokens)
        self._e2e.observe(record.e2e_s)
        for stage, stage_s in record.stages().items():
            self._stages.labels(**labels, stage=stage).observe(stage_s)
            if stage == "prefill_waiting":
                self._queue.observe(stage_s)
        if record.ttft_s is not None:
            self._ttft.observe(record.ttft_s)
        if record.is_streaming:
            # The tokens of an answer that is not streamed arrive together, so they have no gaps.
            for seconds, num_tokens in record.token_gaps:
                for _ in range(num_tokens):
                    self._itl.observe(seconds / num_tokens)
        if record.completion_tokens:
            self._time_per_token.observe(record.e2e_s / record.completion_tokens)

    async def measure_loop(self) -> None:
        """Measure the lag of the running event loop until cancelled."""
        await measure(self._loop_lag.observe)

    def on_request(self) -> None:
        """Count an HTTP request that has begun."""
        self._http_active.inc()

    def on_response(self, scope: Scope, status_code: int) -> None:
        """Count an HTTP request that has ended."""
        self._http_active.dec()
        # Only paths of routes become labels; else a scan of random paths would fill the memory.
        endpoint = scope["route"].path or "other"
        method = scope["method"] if scope["method"] in _METHODS else "other"
        labels = {**self._labels, "endpoint": endpoint, "method": method}
        self._http_requests.labels(**labels).inc()
        self._http_responses.labels(**labels, status_code=str(status_code)).inc()

    def render(self, prefix: str = "") -> bytes:
        """Return the metrics in Prometheus' text format.

        Args:
            prefix: replaces the prefix `sglang:`, whose colon Prometheus reserves for recording
                rules. Names for other routers (`vllm:`) stay as they are.

        Raises:
            InvalidRequest: names with this prefix would break Prometheus' rules.
        """
        if not prefix:
            return generate_latest(self.registry)
        if not _PREFIX.fullmatch(prefix):
            raise InvalidRequest(
                "prefix must be at most 64 letters, digits and underscores that begin with a "
                "letter and end with an underscore, such as headrace_.",
                param="prefix",
            )
        return generate_latest(_Renamed(self.registry, prefix))


class _Renamed(Collector):
    """Yields the metrics of a registry under another prefix."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        self._registry = registry
        self._prefix = prefix

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            if family.name.startswith(_REFERENCE_PREFIX):
                name = family.name.removeprefix(_REFERENCE_PREFIX)
                self._rename(family, self._prefix + _WITHOUT_TYPE.get(name, name))
            yield family

    def _rename(self, family: Metric, name: str) -> None:
        """Rename a metric and its samples; both were made for this scrape only."""
        old, family.name = family.name, name
        family.samples = [
            sample._replace(name=name + sample.name.removeprefix(old)) for sample in family.samples
        ]


class _EngineCollector(Collector):
    """Yields the engine's metrics, one sample for each replica, labelled if there are several."""

    def __init__(self, context: ServiceContext, labels: dict[str, str]) -> None:
        self._context = context
        self._names = [*labels, "tp_rank", "pp_rank"]
        self._values = [*labels.values(), "0", "0"]
        replicas = context.status.replicas
        self._replica_names = [*self._names, *(["dp_rank"] if len(replicas) > 1 else [])]

    def _replica_values(self, replica: ReplicaStatus) -> list[str]:
        return [*self._values, str(replica.rank)][: len(self._replica_names)]

    def collect(self) -> Iterable[Metric]:
        for name, text in _SHARED_GAUGES.items():
            yield self._replica_gauge(name, text, partial(_shared, name))
        if "aibrix" in self._context.config.logging.metrics_aliases:
            waiting = partial(_shared, "num_queue_reqs")
            yield self._replica_gauge("num_waiting_reqs", "Requests that wait.", waiting)
        for name, text in _SHARED_COUNTERS.items():
            family = CounterMetricFamily(f"sglang:{name}", text, labels=self._replica_names)
            for replica in self._context.status.replicas:
                family.add_metric(self._replica_values(replica), replica.shared[name])
            yield family
        yield self._rejected()
        for name, (text, value_of) in _REPLICA_GAUGES.items():
            yield self._replica_gauge(name, text, value_of)
        yield self._gauge(
            "num_grammar_queue_reqs",
            "Requests that wait for a grammar.",
            self._context.client.outgoing.num_compiling,
        )
        yield self._gauge(
            "num_paused_reqs",
            "Requests that wait because generation is paused or weights change.",
            self._context.client.gate.num_held,
        )
        yield self._gauge(
            "num_held_reqs",
            "Requests that wait for a new process, because theirs has died.",
            self._context.client.outgoing.num_waiting,
        )
        resumed = CounterMetricFamily(
            "sglang:num_resumed_requests_total",
            "Times that a request continued in another process.",
            labels=self._names,
        )
        resumed.add_metric(self._values, self._context.client.outgoing.num_resumed)
        yield resumed
        yield self._cache_config()
        cpu = CounterMetricFamily(
            "sglang:process_cpu_seconds_total", "CPU time.", labels=[*self._names, "component"]
        )
        times = os.times()
        cpu.add_metric([*self._values, "front"], times.user + times.system)
        yield cpu

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"sglang:{name}", text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _replica_gauge(
        self, name: str, text: str, value_of: Callable[[ReplicaStatus], float]
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"sglang:{name}", text, labels=self._replica_names)
        for replica in self._context.status.replicas:
            family.add_metric(self._replica_values(replica), value_of(replica))
        return family

    def _rejected(self) -> CounterMetricFamily:
        labels = [*self._replica_names, "component"]
        text = "Messages between processes that could not be decoded and were dropped."
        family = CounterMetricFamily("sglang:rejected_messages_total", text, labels=labels)
        for replica in self._context.status.replicas:
            for component, count in (
                ("front", replica.num_rejected),
                ("scheduler", replica.shared["rejected_by_scheduler"]),
                ("detokenizer", replica.shared["rejected_by_detokenizer"]),
            ):
                family.add_metric([*self._replica_values(replica), component], count)
        return family

    def _cache_config(self) -> GaugeMetricFamily:
        page_size = self._context.config.scheduling.page_size or 1
        labels = [*self._replica_names, "page_size", "num_pages"]
        family = GaugeMetricFamily(
            "sglang:cache_config_info", "Settings of the KV pool, as labels.", labels=labels
        )
        for replica in self._context.status.replicas:
            num_pages = int(replica.shared["max_total_num_tokens"]) // page_size
            values = self._replica_values(replica)
            family.add_metric([*values, str(page_size), str(num_pages)], 1)
        return family


def _shared(name: str, replica: ReplicaStatus) -> float:
    return replica.shared[name]


def _ratio(part: str, whole: str) -> Callable[[ReplicaStatus], float]:
    def ratio(replica: ReplicaStatus) -> float:
        total = replica.shared[whole]
        return replica.shared[part] / total if total else 0.0

    return ratio


def _utilization(replica: ReplicaStatus) -> float:
    worker = replica.worker
    most = 0 if worker is None else worker.max_running_requests
    return replica.shared["num_running_reqs"] / most if most else 0.0


def _load_seconds(replica: ReplicaStatus) -> float:
    return 0.0 if replica.worker is None else replica.worker.load_seconds


_REPLICA_GAUGES: dict[str, tuple[str, Callable[[ReplicaStatus], float]]] = {
    "token_usage": (
        "Share of the KV pool in use.",
        _ratio("num_used_tokens", "max_total_num_tokens"),
    ),
    "cache_hit_rate": (
        "Share of prompt tokens found in the cache.",
        _ratio("cached_tokens_total", "prompt_tokens_total"),
    ),
    "engine_restarts": (
        "Times that a worker was restarted.",
        lambda replica: replica.num_restarts,
    ),
    "engine_startup_time": ("Seconds from process start to ready.", _load_seconds),
    "startup_time_seconds": ("Seconds from process start to ready.", _load_seconds),
    "utilization": ("Running requests divided by the most that may run.", _utilization),
}
