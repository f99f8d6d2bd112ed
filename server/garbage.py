"""When the front process collects garbage."""

from __future__ import annotations

import gc

# New objects before the young are looked at, how often that is before those that outlived it are,
# and how often that is before everything may be.
_THRESHOLDS = (4000, 2, 1000)


def settle() -> None:
    """Leave what lives now out of collections, and look seldom at all that comes later.

    By its own rule Python looks at everything once there is a quarter more, again and again where
    hundreds of streams come, which all stop meanwhile. It finds next to nothing: what has ended is
    free at once. `benchmarks.front_sockets` says what that takes, and by the rule (`--no-settle`).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
