"""A folder with pages of the KV cache, one file each: the third tier of the prefix cache.

    FOLDER / identity of the model / key of the page .kv

The identity is a hash of everything, except the tokens, on which a page's bytes depend: the
weights, the data types, the size of a page. A file has a header, then the bytes of the page:

    magic (8 bytes), identity (32), key (16), length of the page (8), hash of the page (32)

A file gets its name only when it is complete. It is used only if its header and the hash of its
bytes are right; otherwise it is ignored, and the log says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import re
import secrets
import stat
import struct
import threading
import time
from pathlib import Path

logger = logging.getLogger(__name__)

KEY_BYTES = 16
_MAGIC = b"HRPAGE1\n"
_HEADER = struct.Struct("<8s32s16sQ32s")
_NAME = re.compile(rf"[0-9a-f]{{32}}/[0-9a-f]{{{2 * KEY_BYTES}}}\.kv")
# Seconds. An unfinished file that is older was left by a crash; a younger one may belong to another
# server that is writing it.
_UNFINISHED_S = 600.0
# Least time between two lines about the same kind of failure, seconds.
_LOG_INTERVAL_S = 60.0


def _hash(page: bytes | memoryview) -> bytes:
    return hashlib.blake2b(page, digest_size=32).digest()


class PageFiles:
    """The files of one folder. All methods may be called by several threads.

    Attributes:
        most_bytes: most bytes of all files in the folder, those of other models included.
    """

    def __init__(self, folder: Path, identity: bytes, most_bytes: int) -> None:
        """List the files that the folder has.

        Args:
            folder: is created if it is absent. Only its owner may read it, because the files show
                what prompts contained.
            identity: 32 bytes. Pages of another identity are never found.
            most_bytes: see the attribute.

        Raises:
            OSError: the folder cannot be created or listed.
        """
        assert len(identity) == _HEADER.size - 64, "an identity has 32 bytes"
        self.most_bytes = most_bytes
        self._folder = folder
        self._identity = identity
        self._own = identity.hex()[:32]
        self._lock = threading.Lock()
        # Unfinished files are `<random>-<number>.unfinished`. A process id would not tell servers
        # apart: in containers that share the folder it is often 1, and a process may have two
        # instances.
        self._unfinished = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._logged_at: dict[str, float] = {}
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / self._own).mkdir(mode=0o700, exist_ok=True)
        # Size of each file, by its path in the folder; those unused for the longest time first.
        self._sizes = self._list()
        self._num_bytes = sum(self._sizes.values())

    def _list(self) -> dict[str, int]:
        found: list[tuple[float, str, int]] = []
        # This reads the file system's clock, which may be another machine's.
        os.utime(self._folder / self._own)
        now = (self._folder / self._own).stat().st_mtime
        for each in self._folder.glob("*/*"):
            with contextlib.suppress(OSError):
                status, name = each.lstat(), f"{each.parent.name}/{each.name}"
                if not stat.S_ISREG(status.st_mode):
                    continue
                if _NAME.fullmatch(name):
                    found.append((status.st_mtime, name, status.st_size))
                elif each.suffix == ".unfinished" and now - status.st_mtime > _UNFINISHED_S:
                    each.unlink()
        return {name: size for _, name, size in sorted(found)}

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all files."""
        return self._num_bytes

    def _name(self, key: bytes) -> str:
        return f"{self._own}/{key.hex()}.kv"

    def __contains__(self, key: bytes) -> bool:
        return self._name(key) in self._sizes

    def write(self, key: bytes, page: memoryview) -> bool:
        """Write the file of a page, unless it exists; remove the oldest files if there is no room.

        Returns:
            Whether the file is there now. If not, the log says why.
        """
        name, size = self._name(key), _HEADER.size + len(page)
        if name in self._sizes:
            return True
        if not self._make_room(size):
            return False
        header = _HEADER.pack(_MAGIC, self._identity, key, len(page), _hash(page))
        number = next(self._numbers)
        unfinished = self._folder / self._own / f"{self._unfinished}-{number}.unfinished"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with open(os.open(unfinished, flags, 0o600), "wb", buffering=0) as file:
                for part in (memoryview(header), page):
                    written = 0
                    while written < len(part):
                        written += file.write(part[written:]) or 0
            unfinished.replace(self._folder / name)
        except OSError as error:
            self._log("write", "A page was not written to %s: %s", self._folder, error)
            with contextlib.suppress(OSError):
                unfinished.unlink()
            return False
        with self._lock:
            self._num_bytes += size - self._sizes.pop(name, 0)
            self._sizes[name] = size
        return True

    def _make_room(self, size: int) -> bool:
        if size > self.most_bytes:
            return False
        while True:
            with self._lock:
                if self._num_bytes + size <= self.most_bytes:
                    return True
                oldest = next(iter(self._sizes))
                self._num_bytes -= self._sizes.pop(oldest)
            try:
                (self._folder / oldest).unlink(missing_ok=True)
            except OSError as error:
                self._log("remove", "%s was not removed: %s", self._folder / oldest, error)
                return False

    def read(self, key: bytes, page: memoryview) -> bool:
        """Read the file of a page into `page`.

        Returns:
            Whether `page` has the bytes that were written. If not, its content is undefined, the
            file is ignored from now on, and the log says why.
        """
        name = self._name(key)
        try:
            fault = self._read(self._folder / name, key, page)
        except OSError as error:
            fault = str(error)
        with self._lock:
            # A file that was used is the last one to make room.
            size = self._sizes.pop(name, 0)
            if fault is None:
                self._sizes[name] = size or _HEADER.size + len(page)
                self._num_bytes += self._sizes[name] - size
            else:
                self._num_bytes -= size
        if fault is not None:
            self._log("read", "Ignoring %s: %s", self._folder / name, fault)
            return False
        with contextlib.suppress(OSError):
            os.utime(self._folder / name)
        return True

    def _read(self, path: Path, key: bytes, page: memoryview) -> str | None:
        """Return what is wrong with a file; `None` if nothing is."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(path, flags), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size != _HEADER.size + len(page):
                return f"it is not a file of {_HEADER.size + len(page)} bytes"
            header, done = file.read(_HEADER.size), 0
            if len(header) < _HEADER.size:
                return "it is cut short"
            *named, expected = _HEADER.unpack(header)
            if named != [_MAGIC, self._identity, key, len(page)]:
                return "its header is that of another page"
            while done < len(page):
                count = file.readinto(page[done:])
                if not count:
                    return "it is cut short"
                done += count
        return None if _hash(page) == expected else "its bytes are damaged"

    def _log(self, kind: str, message: str, *values: object) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._logged_at.get(kind, -_LOG_INTERVAL_S) < _LOG_INTERVAL_S:
                return
            self._logged_at[kind] = now
        logger.warning(message, *values)
