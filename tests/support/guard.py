"""Ends the processes that tests started once the test process is gone, even if it was killed.

A killed test run cannot clean up. So each test run has one helper process, which reads the ids of
the run's servers from a pipe. When the pipe ends, the helper kills the servers that are left, and
their children exit with them.
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
    # The helper is outside this process's group and session, so that a signal to the group does not
    # end it.
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
    """Forget a process that has ended, because its id may soon belong to another process."""
    _helper().write(f"-{pid}\n")
