"""Numbers the children publish and the front reads, in a small shared file: no message, no queue.

Heartbeats prove that the scheduler's and the detokenizer's loops turn without a request that would
wait behind a long prefill; the gauges are as fresh as the last step whenever someone asks.
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
                # With its blocks: on a full device the first write to the map would be a bus error.
                os.posix_fallocate(descriptor, 0, _SIZE_BYTES)
            self._map = mmap.mmap(descriptor, _SIZE_BYTES)
        finally:
            os.close(descriptor)
        self._cells = memoryview(self._map).cast("d")

    def beat(self) -> None:
        """Note when the scheduler's loop turned."""
        self._cells[0] = time.monotonic()

    def beat_detokenizer(self) -> None:
        """Note when the detokenizer's loop turned."""
        self._cells[1] = time.monotonic()

    def oldest_beat(self) -> tuple[float, str]:
        """Seconds since the older of both last beats, and whose: `worker` or `detokenizer`."""
        # A cell without one is 0: the clock's whole age, which readers bound.
        last, name = min((self._cells[0], "worker"), (self._cells[1], "detokenizer"))
        return time.monotonic() - last, name

    def __getitem__(self, name: str) -> float:
        return self._cells[_INDEX[name]]

    def __setitem__(self, name: str, value: float) -> None:
        self._cells[_INDEX[name]] = value

    def counter(self, name: str) -> Callable[[int], None]:
        """What sets the cell `name` when it is called with a count."""

        def count(value: int) -> None:
            self[name] = value

        return count

    def reset(self) -> None:
        """Zero every cell: a new worker starts from nothing."""
        self._map[:] = bytes(_SIZE_BYTES)

    def close(self) -> None:
        """Unmap the file."""
        self._cells.release()
        self._map.close()
