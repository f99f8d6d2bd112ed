"""Entry point of the front process: `python -m server.launch`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from runtime.ipc.process import uncollected


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Run the server until it is stopped, then exit with its status.

    Args:
        argv: the options; by default this process's own.
        prog: the command's name in messages about options; by default this module's.
    """
    with uncollected():
        from server.front import run
        from server.shutdown import leave
    status = run(sys.argv[1:] if argv is None else argv, prog)
    # `sys.exit` would wait for threads, and a thread may hang in a library.
    leave(status)


if __name__ == "__main__":
    main()
