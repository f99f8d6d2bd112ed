"""Entry point of the front process: `python -m server.launch`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from runtime.ipc.spawn import end_ahead, spawn_ahead

# Options that print something and end.
_PRINTING = frozenset({"-h", "--help", "--version"})


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Run the server until it is stopped, then exit with its status.

    Args:
        argv: the options; by default this process's own.
        prog: the command's name in messages about options; by default this module's.
    """
    argv = sys.argv[1:] if argv is None else argv
    if _PRINTING.isdisjoint(argv):
        # The worker starts to import now. That takes as long as everything that this process does
        # before it can configure the worker.
        spawn_ahead("scheduler")
    try:
        status = _run(argv, prog)
    finally:
        end_ahead()
    from server.shutdown import leave

    # `sys.exit` would wait for threads, and a thread may hang in a library.
    leave(status)


def _run(argv: Sequence[str], prog: str | None) -> int:
    from runtime.ipc.process import uncollected

    with uncollected():
        from server.front import run
    return run(argv, prog)


if __name__ == "__main__":
    main()
