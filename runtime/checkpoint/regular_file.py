"""Opens files of a model folder, only regular ones, so that opening and reading never block.

A client may name a folder, and may have put a pipe or a device there in place of a file. No torch.
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
    """Open a regular file for reading, without a buffer. Links are followed, as in the hub's cache.

    Raises:
        StartupError: the file is not a regular one; the message has one line.
        OSError: the file cannot be opened.
    """
    # The type is checked before opening, because opening a device may have effects. It is checked
    # again afterwards, because the path may lead to another file by then. With O_NONBLOCK, opening
    # a pipe does not wait for a writer.
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
