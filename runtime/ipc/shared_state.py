"""Heartbeats and gauges that child processes write to a shared file and the front process reads.

A message would wait while a long prefill is computed; the file can be read at any time. A heartbeat
shows that the loop of the scheduler or the detokenizer is running. The gauges have the values after
the last step.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

SHARED_STATE_FILE = "state"
FIELDS = (
    "heartbeat_time",
    "detokenizer_time",
    "has_work",
    "num_running_reqs",
    "num_queue_reqs",
    "num_retracted_reqs",
    "num_used_tokens",
    "num_cached_tokens",
    "max_total_num_tokens",
    "gen_throughput",
    "prompt_tokens_total",
    "cached_tokens_total",
    "generation_tokens_total",
    "num_retractions_total",
    "num_nan_requests_total",
    "num_steps_total",
    "evicted_tokens_total",
    "load_back_tokens_total",
    "prefetched_tokens_total",
    "backuped_tokens_total",
    "hicache_host_used_tokens",
    "hicache_host_total_tokens",
    "images_computed_total",
    "image_cache_hits_total",
    "image_cache_bytes",
    "decode_sum_seq_lens",
    "lora_pool_slots_used",
    "lora_pool_slots_total",
    "engine_load_weights_time",
    "rejected_by_scheduler",
    "rejected_by_detokenizer",
)
_INDEX = {name: index for index, name in enumerate(FIELDS)}
_SIZE_BYTES = 8 * len(FIELDS)


class SharedState:
    """Float64 values by name in a memory-mapped file.

    Each value is written by one process, and may be read by any.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Map the file at `path`; `create` creates it, filled with zeros."""
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:
                # This allocates disk blocks. Without them, writing to a full device is a bus error.
                os.posix_fallocate(descriptor, 0, _SIZE_BYTES)
            self._map = mmap.mmap(descriptor, _SIZE_BYTES)
        finally:
            os.close(descriptor)
        self._cells = memoryview(self._map).cast("d")

    def beat(self) -> None:
        """Record a heartbeat of the scheduler's loop."""
        self._cells[0] = time.monotonic()

    def beat_detokenizer(self) -> None:
        """Record a heartbeat of the detokenizer's loop."""
        self._cells[1] = time.monotonic()

    def oldest_beat(self) -> tuple[float, str]:
        """Return the seconds since the older of the two heartbeats, and the name of its process.

        The name is `worker` or `detokenizer`.
        """
        # Without any heartbeat the value is 0, and the age is that of the clock. Callers limit it.
        last, name = min((self._cells[0], "worker"), (self._cells[1], "detokenizer"))
        return time.monotonic() - last, name

    def __getitem__(self, name: str) -> float:
        return self._cells[_INDEX[name]]

    def __setitem__(self, name: str, value: float) -> None:
        self._cells[_INDEX[name]] = value

    def counter(self, name: str) -> Callable[[int], None]:
        """Return a function that sets the value `name` to a count."""

        def count(value: int) -> None:
            self[name] = value

        return count

    def reset(self) -> None:
        """Set all values to zero, for a new worker."""
        self._map[:] = bytes(_SIZE_BYTES)

    def close(self) -> None:
        """Unmap the file."""
        self._cells.release()
        self._map.close()
