"""Measures the memory of processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the resident memory of processes together; shared memory counts for each.

    A process that has ended counts as 0 bytes, and so does any process on a system without `/proc`.
    """
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            status = Path(f"/proc/{pid}/status").read_text()
            total += int(status.split("VmRSS:")[1].split()[0]) * 1024
    return total
