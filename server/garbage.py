"""Garbage collection in the front process."""

from __future__ import annotations

import gc

# New objects before a collection of the youngest generation, the number of those before one of the
# middle generation, and the number of those before a full collection may run.
_THRESHOLDS = (4000, 2, 1000)


def settle() -> None:
    """Exclude the current objects from collections, and make later collections rare.

    By default Python runs a full collection each time the number of objects has grown by a quarter.
    When hundreds of streams arrive, full collections repeat and stop all streams. They free almost
    nothing, because finished requests are freed immediately. `benchmarks.front_sockets` measures
    the cost of `settle`, and with `--no-settle` the cost of Python's default.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
