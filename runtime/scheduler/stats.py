"""Publishes the scheduler's gauges and counters to shared memory, and logs some of them."""

from __future__ import annotations

import logging

import msgspec
import numpy as np

from runtime.cache.manager import CacheManager
from runtime.ipc.messages import ControlReply, MatchPrefix, PrefixReport
from runtime.ipc.shared_state import SharedState
from runtime.scheduler.adapter_places import AdapterPlaces
from runtime.scheduler.image_cache import ImageCache, cache_keys
from runtime.scheduler.table import RequestTable
from runtime.step.step_plan import StepPlan


def report_prefix(message: MatchPrefix, cache: CacheManager, generation: str) -> ControlReply:
    """Return how much of a prompt is in the prefix cache; the cache does not change.

    Args:
        message: the prompt whose cached prefix is wanted.
        cache: the worker's prefix cache.
        generation: prefix of every cache namespace, renewed when the cache was invalidated.
    """
    tokens = cache_keys(np.frombuffer(message.input_ids, dtype=np.int32), message.images)
    found = cache.common_prefix(tokens, generation + message.namespace)
    # The last token is always computed, even if its page is cached.
    num_cached = cache.count_found(tokens[:-1], generation + message.namespace)
    report = PrefixReport(found.num_tokens, num_cached, found.differs)
    return ControlReply(message.call_id, True, data=msgspec.msgpack.encode(report))


logger = logging.getLogger(__name__)

# Length of the time window over which the gauge `gen_throughput` is averaged, seconds.
THROUGHPUT_WINDOW_S = 1.0
# Least time with work between two log lines, seconds.
LOG_INTERVAL_S = 5.0


class SchedulerStats:
    """Gauges and counters of one worker.

    Attributes:
        num_prompt_tokens: prompt tokens of all accepted requests.
        log_interval: least number of decode steps between two log lines.
    """

    def __init__(
        self, shared: SharedState, log_interval: int, images: ImageCache | None = None
    ) -> None:
        """Publish to `shared`; log every `log_interval` decode steps.

        With `images`, the counters of the image cache are published too.
        """
        self._shared = shared
        self._images = images
        self.log_interval = log_interval
        self.num_prompt_tokens = 0
        self._num_steps = 0
        self._num_decode_steps = 0
        self._window_start: float | None = None
        self._window_tokens = 0
        self._window_has_work = False
        self._throughput = 0.0
        # Time and tokens since the last log line, without windows in which there was no work.
        self._logged_s = 0.0
        self._logged_tokens = 0

    def count_step(self, plan: StepPlan) -> None:
        """Count a launched step, and log it at level debug if it computes prompts."""
        self._num_steps += 1
        chunks = len(plan.rows) - plan.num_decodes
        if plan.num_decodes:
            self._num_decode_steps += 1
        if chunks:
            logger.debug(
                "Prefill: %d sequences, %d tokens, %d decoding",
                chunks,
                int(plan.query_lens[plan.num_decodes :].sum()),
                plan.num_decodes,
            )

    def publish(  # noqa: PLR0913  # what it publishes
        self,
        *,
        now: float,
        has_work: bool,
        table: RequestTable,
        cache: CacheManager,
        num_waiting: int,
        num_retracted: int,
        num_generated: int,
        num_retractions: int,
        num_nan: int,
        num_prefix_hits: int,
        adapters: AdapterPlaces,
    ) -> None:
        """Write all gauges and counters to shared memory, and publish the cache's events.

        Call this regularly, also while there is no work.

        Args:
            now: the current `time.monotonic()`.
            has_work: whether there is a live request or a step in flight.
            table: the running batch.
            cache: the KV cache.
            num_waiting: number of requests in the queue or with a grammar that is loading.
            num_retracted: number of these requests that ran before.
            num_generated: output tokens so far.
            num_retractions: how often a running request was put back into the queue so far.
            num_nan: requests so far whose logits contained NaN.
            num_prefix_hits: prompt tokens that were found in the prefix cache so far.
            adapters: the LoRA adapters on the device.
        """
        cache.publish_events()
        self._measure(now, num_generated, has_work)
        shared = self._shared
        page_size = cache.page_size
        shared["has_work"] = float(has_work)
        shared["num_running_reqs"] = table.num_running
        shared["num_queue_reqs"] = num_waiting
        shared["num_retracted_reqs"] = num_retracted
        shared["num_used_tokens"] = cache.num_held_pages * page_size
        shared["num_cached_tokens"] = cache.tree.num_pages * page_size
        shared["max_total_num_tokens"] = cache.pool.num_pages * page_size
        shared["gen_throughput"] = self._throughput
        shared["prompt_tokens_total"] = self.num_prompt_tokens
        shared["cached_tokens_total"] = num_prefix_hits
        shared["generation_tokens_total"] = num_generated
        shared["num_retractions_total"] = num_retractions
        shared["num_nan_requests_total"] = num_nan
        shared["num_steps_total"] = self._num_steps
        shared["evicted_tokens_total"] = cache.num_evicted_tokens
        if cache.host is not None:
            shared["load_back_tokens_total"] = cache.host.num_loaded * page_size
            shared["hicache_host_used_tokens"] = cache.host.num_held * page_size
            shared["hicache_host_total_tokens"] = cache.host.pool.num_pages * page_size
            if (files := cache.host.files) is not None:
                shared["prefetched_tokens_total"] = files.num_read * page_size
                shared["backuped_tokens_total"] = files.num_written * page_size
        shared["lora_pool_slots_used"] = adapters.num_used
        shared["lora_pool_slots_total"] = adapters.num_slots
        if self._images is not None:
            shared["images_computed_total"] = self._images.num_computed
            shared["image_cache_hits_total"] = self._images.num_hits
            shared["image_cache_bytes"] = self._images.size_bytes
        shared["decode_sum_seq_lens"] = (
            int(table.num_computed[np.array(table.order, dtype=np.int64)].sum())
            if table.order
            else 0
        )
        if self._num_decode_steps >= self.log_interval and self._logged_s >= LOG_INTERVAL_S:
            logger.info(
                "Decode: %d running, %d waiting, %.2f of the KV pool used, %.1f tokens/s",
                table.num_running,
                num_waiting,
                cache.num_held_pages / cache.pool.num_pages,
                self._logged_tokens / self._logged_s,
            )
            self._num_decode_steps = self._logged_tokens = 0
            self._logged_s = 0.0

    def _measure(self, now: float, num_generated: int, has_work: bool) -> None:
        """Measure the throughput of the current time window, if the window has ended.

        A moment without work does not end the window early.
        """
        self._window_has_work |= has_work
        start = self._window_start
        if start is not None and now - start < THROUGHPUT_WINDOW_S:
            return
        if start is not None:
            tokens = num_generated - self._window_tokens
            self._throughput = tokens / (now - start)
            if tokens or self._window_has_work:
                self._logged_s += now - start
                self._logged_tokens += tokens
        self._window_start, self._window_tokens = now, num_generated
        self._window_has_work = has_work
