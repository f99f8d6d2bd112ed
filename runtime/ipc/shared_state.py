"""Numbers that the children write and the front reads, in a small shared file.

No message is needed, which would wait behind a long prefill. Heartbeats show that the loops of the
scheduler and the detokenizer run; gauges are always as recent as the last step.
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
    """Named float64 cells in a memory-mapped file; one process writes each, any process reads."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Map the file at `path`; `create` makes it, filled with zeros."""
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            if create:
                # Allocates blocks: else a write to the map on a full device is a bus error.
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
        """Seconds since the older heartbeat, and its process: `worker` or `detokenizer`."""
        # A cell without a heartbeat is 0, which gives the age of the clock; callers bound it.
        last, name = min((self._cells[0], "worker"), (self._cells[1], "detokenizer"))
        return time.monotonic() - last, name

    def __getitem__(self, name: str) -> float:
        return self._cells[_INDEX[name]]

    def __setitem__(self, name: str, value: float) -> None:
        self._cells[_INDEX[name]] = value

    def counter(self, name: str) -> Callable[[int], None]:
        """A function that sets the cell `name` to a count."""

        def count(value: int) -> None:
            self[name] = value

        return count

    def reset(self) -> None:
        """Set every cell to zero, for a new worker."""
        self._map[:] = bytes(_SIZE_BYTES)

    def close(self) -> None:
        """Unmap the file."""
        self._cells.release()
        self._map.close()
