"""Opening files of a model folder: regular ones only, so that no open and no read waits.

Anybody who may name a folder may have put a pipe or a device there under the name of a file.
Front-safe.
"""

from __future__ import annotations

import os
import stat
from io import FileIO
from pathlib import Path

from runtime.errors import StartupError

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def open_regular(path: Path) -> FileIO:
    """Open a regular file to read, without a buffer; a link to one will do, as in the hub's cache.

    Raises:
        StartupError: something else than a regular file; one line.
        OSError: it cannot be opened.
    """
    # Before: opening a device may do something. After: the path may name something else by now.
    # With O_NONBLOCK the open of a pipe does not wait for a writer.
    _require_regular(path, path.stat())
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_regular(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return FileIO(descriptor)


def _require_regular(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise StartupError(f"{path} is {kind}, not a regular file")
