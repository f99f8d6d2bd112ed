"""Imported by documents that run as notebooks; harmless anywhere else, and when imported twice.

It applies `nest_asyncio` where that is installed, for the documents' own `asyncio.run` inside a
notebook (an `Engine` needs none). Engines made after the import take few rows and a small KV pool,
so that several documents fit on one device.
"""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from types import MappingProxyType

from headrace.server_process import launch_server_cmd

__all__ = ["DOCUMENT_ARGUMENTS", "launch_server_cmd"]

# Read by `Engine`; what a caller names itself goes before.
DOCUMENT_ARGUMENTS = MappingProxyType({"max_running_requests": 128, "max_total_tokens": 20480})


def _allow_nested_loops() -> None:
    try:
        import nest_asyncio
    except ImportError:
        return
    # It refuses loops that it cannot patch (uvloop), where nothing is lost.
    with contextlib.suppress(ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            nest_asyncio.apply()
        except RuntimeError:
            # Python 3.14 makes no loop by itself.
            asyncio.set_event_loop(asyncio.new_event_loop())
            nest_asyncio.apply()


_allow_nested_loops()
