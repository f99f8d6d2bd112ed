"""Images in files of the server's machine, under the folders that the operator named."""

from __future__ import annotations

import os
import stat
import urllib.parse
from pathlib import PurePath

from runtime.errors import InvalidRequest
from runtime.media.image_source import MAX_IMAGE_BYTES, FileImage, too_many_bytes
from runtime.media.media_policy import MediaPolicy

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# The open of a pipe does not wait for a writer.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_file(source: FileImage, policy: MediaPolicy, param: str) -> bytes:
    """The bytes of a file under one of the roots; blocks.

    Args:
        source: its path, as the request has it; a relative one is looked for below each root.
        policy: what the operator allows.
        param: its place in the request, for errors.

    Raises:
        InvalidRequest: no file may be named, or not this one, or it is too large.
    """
    if not policy.roots:
        raise InvalidRequest(
            f"{param}: files are not read here (--media-root names the folders whose files may "
            "be). Send the image as base64 or as a data URL.",
            param=param,
        )
    path = urllib.parse.unquote(source.path) if "%" in source.path else source.path
    for root in policy.roots:
        real = _real_path(root, path)
        if real is None or not real.is_relative_to(root):
            continue
        try:
            return _read_below(root, real.relative_to(root).parts, param)
        except OSError:
            continue
    raise InvalidRequest(f"{param}: there is no such regular file under --media-root.", param=param)


def _real_path(root: str, path: str) -> PurePath | None:
    try:
        # Where the links lead that are in it now; what is opened later has none.
        return PurePath(os.path.realpath(os.path.join(root, path)))
    except (OSError, ValueError):
        return None


def _read_below(root: str, parts: tuple[str, ...], param: str) -> bytes:
    """Open folder by folder, through no link, whatever was put there meanwhile."""
    if not parts:
        raise IsADirectoryError
    folder = os.open(root, _FOLDER)
    try:
        for name in parts[:-1]:
            inner = os.open(name, _FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        # Looked at before: opening a device may do something.
        _require_regular(os.stat(parts[-1], dir_fd=folder, follow_symlinks=False))
        file = os.open(parts[-1], _FILE, dir_fd=folder)
    finally:
        os.close(folder)
    with open(file, "rb", buffering=0) as opened:
        found = os.fstat(file)
        _require_regular(found)
        if found.st_size > MAX_IMAGE_BYTES:
            raise too_many_bytes(param)
        content = opened.read(MAX_IMAGE_BYTES + 1) or b""
    if len(content) > MAX_IMAGE_BYTES:
        raise too_many_bytes(param)
    return content


def _require_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise IsADirectoryError
