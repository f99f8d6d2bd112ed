"""Returns freed memory to the operating system, which the C library's allocator would keep."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Return freed memory to the operating system, if the C library supports it.

    This takes milliseconds for each 100 MB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
