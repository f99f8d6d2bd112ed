"""Metrics of adapters (LoRA). Labels contain only names of adapters that are registered now."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.service.context import ServiceContext


class AdapterCollector(Collector):
    """Counts the requests of each adapter, and the device's slots for adapters."""

    def __init__(self, context: ServiceContext, labels: dict[str, str]) -> None:
        """Read the numbers from `context` at each scrape; `labels` are on every sample."""
        self._context = context
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics with their current values."""
        names, values = list(self._labels), list(self._labels.values())
        requests = CounterMetricFamily(
            "sglang:lora_requests_total",
            "Requests that used an adapter.",
            labels=[*names, "lora_name"],
        )
        running = GaugeMetricFamily(
            "sglang:lora_requests_in_flight",
            "Requests that use an adapter and have not ended.",
            labels=[*names, "lora_name"],
        )
        client = self._context.client
        for adapter in client.adapters.all():
            requests.add_metric([*values, adapter.name], adapter.num_requests)
            in_flight = len(client.with_adapter(adapter.adapter_id))
            running.add_metric([*values, adapter.name], in_flight)
        yield requests
        yield running
        used = total = 0.0
        for replica in self._context.status.replicas:
            used += replica.shared["lora_pool_slots_used"]
            total += replica.shared["lora_pool_slots_total"]
        for name, text, value in (
            ("slots_used", "Slots of the device whose adapter running requests use.", used),
            ("slots_total", "Adapters that the device holds.", total),
            ("utilization", "Used slots divided by all slots.", used / total if total else 0.0),
        ):
            gauge = GaugeMetricFamily(f"sglang:lora_pool_{name}", text, labels=names)
            gauge.add_metric(values, value)
            yield gauge


def vllm_requests_info(context: ServiceContext) -> GaugeMetricFamily:
    """Return vLLM's gauge of the adapters in use, for routers.

    The names are in the labels; the value is the current Unix time, as in vLLM.
    """
    client = context.client
    running, waiting = [], []
    for adapter in client.adapters.all():
        streams = client.with_adapter(adapter.adapter_id)
        if any(stream.times is not None for stream in streams):
            running.append(adapter.name)
        elif streams:
            waiting.append(adapter.name)
    gauge = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Adapters in use, and those whose requests wait.",
        labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    most = str(context.config.lora.max_loras_per_batch)
    gauge.add_metric([most, ",".join(running), ",".join(waiting)], time.time())
    return gauge
