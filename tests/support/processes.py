"""Reads facts about processes from `/proc`; a process that has ended meanwhile counts as absent."""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Collection
from pathlib import Path

# The module of processes that belong to the tests and not to a server; see `warm_start`.
OF_TESTS = "tests.support.warm_start"


def children(pid: int) -> list[int]:
    """Return the ids of the child processes of `pid`, started by any of its threads."""
    found: list[int] = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        # The thread may have ended meanwhile, too.
        with contextlib.suppress(OSError):
            found += [int(word) for word in Path(path).read_text().split()]
    return [child for child in found if OF_TESTS not in command(child)]


def engine_processes(pid: int, besides: Collection[int] = ()) -> dict[str, int]:
    """Return an engine's child processes by name, such as `scheduler`; omit those in `besides`."""
    found = {}
    for child in children(pid):
        words = command(child)
        if "runtime.ipc.process" in words and child not in besides:
            found[words[words.index("runtime.ipc.process") + 1]] = child
    return found


def command(pid: int) -> list[str]:
    """Return the words of a process's command line; empty if the process has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
    return []


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


def resident_kb(pid: int) -> int:
    """Return the resident memory of a process, in kB."""
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])
