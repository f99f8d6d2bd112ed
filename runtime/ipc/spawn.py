"""Starts the processes of this project's modules, and the worker's process ahead of time.

This module needs only the standard library. So the front process can start the worker's process
before its own imports, and both import at the same time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple

# Environment variable with the file descriptor to which a child writes its threads' stacks.
STACKS_FILE = "HEADRACE_STACKS_FILE"
# The second argument of a child that is started ahead of its configuration.
AHEAD = "ahead"
# Threads that spin between two operators would take the CPU from the front process.
WAITING_THREADS = {
    "GOMP_SPINCOUNT": "1000",
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
}
# The variables that the libraries read while they are imported. The others are sent later.
_ENVIRONMENT_AHEAD = {**WAITING_THREADS, "OPENBLAS_NUM_THREADS": "1"}


class Spawned(NamedTuple):
    """A process that has just started.

    Attributes:
        process: the process; its stdin is a pipe, which stays open as long as it should live.
        stacks: file in memory, to which the process writes the stacks of its threads.
    """

    process: subprocess.Popen[bytes]
    stacks: IO[bytes]


def child_environment(changes: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the environment of a child process that runs one of this project's modules.

    It is this process's environment, with `changes`, and with the project on `PYTHONPATH`.
    """
    ours = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([ours, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **changes}


def spawn(
    entry: str,
    environment: Mapping[str, str],
    stderr: int | None = None,
    *,
    is_ahead: bool = False,
) -> Spawned:
    """Start a child process of `runtime.ipc.process`.

    Args:
        entry: name of the process in `CHILD_ENTRIES`.
        environment: additional environment variables.
        stderr: as for `subprocess.Popen`.
        is_ahead: whether the process imports its modules before it reads its stdin.
    """
    # The stacks are written to memory, where neither a full disk nor an unread pipe blocks.
    stacks = os.fdopen(os.memfd_create(f"stacks-{entry}"), "rb")
    process = subprocess.Popen(
        # With -P the current folder is not on the path, where it could hide this package.
        [sys.executable, "-P", "-m", "runtime.ipc.process", entry, *([AHEAD] if is_ahead else [])],
        pass_fds=(stacks.fileno(),),
        stdin=subprocess.PIPE,
        stderr=stderr,
        env=child_environment({**environment, STACKS_FILE: str(stacks.fileno())}),
        # Ctrl-C in a terminal must reach the front process only, which ends its children itself.
        start_new_session=True,
    )
    return Spawned(process, stacks)


# The processes that were started ahead and not taken yet, by entry.
_ahead: dict[str, Spawned] = {}


def spawn_ahead(entry: str) -> int:
    """Start a process whose configuration is not known yet; `take_ahead` returns it later.

    Returns:
        The process id.
    """
    _ahead[entry] = spawn(entry, _ENVIRONMENT_AHEAD, is_ahead=True)
    return _ahead[entry].process.pid


def take_ahead(entry: str) -> Spawned | None:
    """Return the process that `spawn_ahead` has started, once; `None` if it is not running."""
    spawned = _ahead.pop(entry, None)
    if spawned is None or spawned.process.poll() is None:
        return spawned
    _end(spawned)
    return None


def end_ahead() -> None:
    """End the processes that were started ahead and not taken."""
    while _ahead:
        _end(_ahead.popitem()[1])


def _end(spawned: Spawned) -> None:
    spawned.process.kill()
    spawned.process.communicate()
    spawned.stacks.close()
