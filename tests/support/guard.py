"""Ends what the tests have started when their own process is gone, however it went.

A killed test run cannot clean up. One helper process a test run reads the ids of its servers from a
pipe; at the pipe's end it kills those that are left, and their children leave with them.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from typing import IO

_HELPER = """
import os, signal, sys
left = set()
for line in sys.stdin:
    (left.add if line[0] == "+" else left.discard)(int(line[1:]))
for pid in left:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
"""


@cache
def _helper() -> IO[str]:
    # Outside this process's group and session: what ends that group must leave it alive.
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", _HELPER],
        stdin=subprocess.PIPE,
        text=True,
        bufsize=1,
        start_new_session=True,
    )
    assert process.stdin is not None
    return process.stdin


def watch(pid: int) -> None:
    """End process `pid` with this one; a negative number names a process group."""
    _helper().write(f"+{pid}\n")


def unwatch(pid: int) -> None:
    """Forget a process that has ended: its number may be another's soon."""
    _helper().write(f"-{pid}\n")
