"""Where profiles are written: one folder, and what lies in it by no link.

Whoever may start a profile names a folder. Without a root that name makes folders anywhere, and a
link that somebody else planted leads the files elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from runtime.errors import InvalidRequest


def make_folder(root: str | None, wanted: str | None) -> str:
    """The folder for a profile, made if need be.

    Args:
        root: what it has to lie in; a folder of this user for temporary files when absent.
        wanted: absolute or relative to `root`; the root itself when absent.

    Raises:
        InvalidRequest: it lies elsewhere, cannot be made or written to, or a link leads to it.
    """
    shared = root is None
    base = Path(root or Path(tempfile.gettempdir()) / f"headrace-profiles-{os.getuid()}").absolute()
    parts = _parts(base, wanted or "")
    path = base
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The operator's own root may be a link; in a folder that all users share nothing may.
        opened = os.open(base, os.O_RDONLY | os.O_DIRECTORY | (os.O_NOFOLLOW if shared else 0))
        try:
            if shared:
                _require_own(opened)
            for part in parts:
                path /= part
                opened = _enter(opened, part)
        finally:
            os.close(opened)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _refused(f"cannot be made, or a link leads to it: {reason}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise _refused("cannot be written to")
    return str(path)


def _parts(base: Path, wanted: str) -> tuple[str, ...]:
    if not wanted.isprintable():
        # It is shown in the log.
        raise _refused("has characters that cannot be printed")
    inside = Path(wanted)
    if inside.is_absolute():
        if not inside.is_relative_to(base):
            raise _refused(f"must lie in {base} (--profile-root), where it is by default")
        inside = inside.relative_to(base)
    if ".." in inside.parts:
        raise _refused("must not climb out of its folder by '..'")
    return inside.parts


def _enter(parent: int, name: str) -> int:
    """Open the folder `name` in `parent`, made where there is none; `parent` is closed then."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, mode=0o700, dir_fd=parent)
    found = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    os.close(parent)
    return found


def _require_own(descriptor: int) -> None:
    found = os.fstat(descriptor)
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise _refused("is by default in a folder that others may write to: set --profile-root")


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"output_dir {why}.", param="output_dir")
