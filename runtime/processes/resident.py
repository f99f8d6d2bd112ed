"""Measures the memory that processes use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the resident memory of processes together, in bytes; shared memory counts for each.

    A process that has ended counts as 0. Without `/proc` the result is 0.
    """
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            status = Path(f"/proc/{pid}/status").read_text()
            total += int(status.split("VmRSS:")[1].split()[0]) * 1024
    return total
