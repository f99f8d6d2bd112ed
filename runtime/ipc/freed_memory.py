"""Memory that was freed goes back to the system; the C library's allocator keeps it."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Return it, if the C library can; takes milliseconds for each 100 MB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
