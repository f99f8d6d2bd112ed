"""Settings of garbage collection in the front process."""

from __future__ import annotations

import gc

# The arguments of `gc.set_threshold`: the number of new objects that triggers a collection of the
# youngest generation; the number of such collections that triggers one of the middle generation;
# and the number of the latter that triggers one of all objects.
_THRESHOLDS = (4000, 2, 1000)


def settle() -> None:
    """Exclude the current objects from collections, and make later collections rare.

    By default Python runs a full collection each time the number of objects has grown by a quarter.
    When hundreds of streams arrive, this happens repeatedly, and each collection stops all streams.
    Full collections free almost nothing, because the objects of an ended request are freed at once.
    `benchmarks.front_sockets` measures the cost with these settings, and with `--no-settle` the
    cost with Python's default.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
