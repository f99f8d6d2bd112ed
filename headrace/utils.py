"""Helpers that users' notebooks import by this module's name; the work is done elsewhere."""

from __future__ import annotations

import html
import json
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.server_process import (
    execute_shell_command,
    launch_server_cmd,
    release_port,
    reserve_port,
    terminate_process,
    wait_for_http_ready,
    wait_for_server,
)
from headrace.streaming import async_stream_and_merge, stream_and_merge, trim_overlap

__all__ = [
    "async_stream_and_merge",
    "execute_shell_command",
    "get_exception_traceback",
    "is_in_ci",
    "launch_server_cmd",
    "print_highlight",
    "read_jsonl",
    "release_port",
    "reserve_port",
    "stream_and_merge",
    "terminate_process",
    "trim_overlap",
    "wait_for_http_ready",
    "wait_for_server",
]

_CI_VARIABLES = ("HEADRACE_IS_IN_CI", "SGLANG_IS_IN_CI")


def is_in_ci() -> bool:
    """Whether the documents run in a build, as an environment variable says."""
    return any(os.environ.get(name, "").lower() in ("1", "true") for name in _CI_VARIABLES)


def print_highlight(text: object) -> None:
    """Print; in a build's notebook, in bold and blue."""
    if not is_in_ci():
        print(text)
        return
    from IPython.display import HTML, display

    shown = html.escape(str(text)).replace("\n", "<br>")
    display(HTML(f"<strong style='color: #00008B;'>{shown}</strong>"))


def read_jsonl(filename: str) -> Iterator[dict[str, Any]]:
    """Each line of a JSON lines file; lines that begin with `#` are comments."""
    with Path(filename).open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip() and not line.startswith("#"):
                yield json.loads(line)


def get_exception_traceback() -> str:
    """The traceback of the exception that is being handled."""
    return traceback.format_exc()
