"""How much memory processes hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path


def resident_bytes(pids: Iterable[int]) -> int:
    """Resident memory of processes together; what they share counts for each.

    A process that has ended counts for nothing, and so does one of a system without `/proc`.
    """
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            status = Path(f"/proc/{pid}/status").read_text()
            total += int(status.split("VmRSS:")[1].split()[0]) * 1024
    return total
