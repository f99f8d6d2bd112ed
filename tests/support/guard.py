"""Ends the processes that tests have started when the test process ends, even if it is killed.

A killed test run cannot clean up. So each test run has a helper process, which reads the ids of the
run's processes from a pipe. When the pipe is closed, the helper kills those that are left. Their
child processes then exit by themselves.
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
    # The helper has its own process group and session, so that a signal to the group of the tests
    # does not end it.
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
    """Let process `pid` be killed when this process ends; negative ids are process groups."""
    _helper().write(f"+{pid}\n")


def unwatch(pid: int) -> None:
    """Forget a process that has ended, because its id may be used again for another process."""
    _helper().write(f"-{pid}\n")
