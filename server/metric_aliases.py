"""The engine's metrics under the names that routers for vLLM and AIBrix read."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.processes.status import ReplicaStatus
from runtime.service.context import ServiceContext
from server.adapter_metrics import vllm_requests_info

_KV_USAGE = "Share of the KV pool in use."


def _token_usage(replica: ReplicaStatus) -> float:
    total = replica.shared["max_total_num_tokens"]
    return replica.shared["num_used_tokens"] / total if total else 0.0


def _shared(name: str) -> Callable[[ReplicaStatus], float]:
    return lambda replica: replica.shared[name]


_VLLM_GAUGES: dict[str, tuple[str, Callable[[ReplicaStatus], float]]] = {
    "num_requests_running": ("Requests in the running batch.", _shared("num_running_reqs")),
    "num_requests_waiting": ("Requests that wait.", _shared("num_queue_reqs")),
    "kv_cache_usage_perc": (_KV_USAGE, _token_usage),
    # The older name in vLLM.
    "gpu_cache_usage_perc": (_KV_USAGE, _token_usage),
}
_QUERIES = ("Prompt tokens.", _shared("prompt_tokens_total"))
_HITS = ("Prompt tokens found in the prefix cache.", _shared("cached_tokens_total"))
_VLLM_COUNTERS = {
    "prefix_cache_queries_total": _QUERIES,
    "prefix_cache_hits_total": _HITS,
    # The older names in vLLM.
    "gpu_prefix_cache_queries_total": _QUERIES,
    "gpu_prefix_cache_hits_total": _HITS,
}


class VllmAliases(Collector):
    """Metrics with vLLM's names and labels: the model's name, and the replica as `engine`."""

    def __init__(self, context: ServiceContext) -> None:
        """Read the values from `context` at each scrape."""
        self._context = context
        self._names = ["model_name", "engine"]

    def _values(self, replica: ReplicaStatus) -> list[str]:
        return [self._context.served_model_name, str(replica.rank)]

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics with their current values, one sample for each replica."""
        for name, (text, value_of) in _VLLM_GAUGES.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=self._names)
            for replica in self._context.status.replicas:
                gauge.add_metric(self._values(replica), value_of(replica))
            yield gauge
        for name, (text, value_of) in _VLLM_COUNTERS.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=self._names)
            for replica in self._context.status.replicas:
                counter.add_metric(self._values(replica), value_of(replica))
            yield counter
        yield self._cache_config()
        if self._context.client.adapters.is_enabled:
            yield vllm_requests_info(self._context)

    def _cache_config(self) -> GaugeMetricFamily:
        scheduling = self._context.config.scheduling
        page_size = scheduling.page_size or 1
        family = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Shape of the KV pool.",
            labels=[*self._names, "block_size", "num_gpu_blocks", "enable_prefix_caching"],
        )
        for replica in self._context.status.replicas:
            num_pages = int(replica.shared["max_total_num_tokens"]) // page_size
            has_prefixes = str(not scheduling.disable_radix_cache)
            values = [*self._values(replica), str(page_size), str(num_pages), has_prefixes]
            family.add_metric(values, 1)
        return family
