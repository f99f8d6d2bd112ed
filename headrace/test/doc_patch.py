"""Prepares documents that run as notebooks. Importing this module elsewhere or twice is harmless.

The import applies `nest_asyncio` if installed, so that a document may call `asyncio.run` inside a
notebook (an `Engine` does not need `nest_asyncio`). Engines made after the import run few requests
at a time and have a small KV pool, so that several documents fit on one device.
"""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from types import MappingProxyType

from headrace.server_process import launch_server_cmd

__all__ = ["DOCUMENT_ARGUMENTS", "launch_server_cmd"]

# `Engine` reads these arguments. Arguments of the caller have priority.
DOCUMENT_ARGUMENTS = MappingProxyType({"max_running_requests": 128, "max_total_tokens": 20480})


def _allow_nested_loops() -> None:
    try:
        import nest_asyncio
    except ImportError:
        return
    # `nest_asyncio` raises for loops that it cannot patch, such as uvloop; the error is ignored.
    with contextlib.suppress(ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            nest_asyncio.apply()
        except RuntimeError:
            # Python 3.14 does not create a loop automatically.
            asyncio.set_event_loop(asyncio.new_event_loop())
            nest_asyncio.apply()


_allow_nested_loops()
