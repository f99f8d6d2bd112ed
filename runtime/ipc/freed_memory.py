"""Returns freed memory to the system; the C library's allocator would keep the memory."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Return freed memory if the C library can; this takes milliseconds for each 100 MB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
