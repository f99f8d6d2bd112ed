"""Where the front process begins: `python -m server.launch`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from runtime.ipc.process import uncollected


def main(argv: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Run the server until it is told to stop; ends the process with its status.

    Args:
        argv: the options; those of this process when absent.
        prog: what was called, for messages about them; else this module.
    """
    with uncollected():
        from server.front import run
        from server.shutdown import leave
    status = run(sys.argv[1:] if argv is None else argv, prog)
    # Not by `sys.exit`: the interpreter waits for threads, and one may hang in a library.
    leave(status)


if __name__ == "__main__":
    main()
