"""A file on a disk that stalls: the kernel holds every process that reads it."""

from __future__ import annotations

import ctypes
import os
import select
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.waiting import until

# Constants from linux/fanotify.h and linux/fcntl.h.
_FAN_CLASS_CONTENT, _FAN_CLOEXEC, _FAN_NONBLOCK = 0x4, 0x1, 0x2
_FAN_MARK_ADD, _FAN_ACCESS_PERM, _FAN_ALLOW = 0x1, 0x20000, 0x1
_AT_FDCWD = -100
# struct fanotify_event_metadata: event_len, vers, reserved, metadata_len, mask, fd, pid.
_EVENT = struct.Struct("=IBBHQii")
_RESPONSE = struct.Struct("=iI")


@contextmanager
def stalled(path: Path) -> Iterator[Callable[[], int]]:
    """Hold every process that reads a file in the kernel's `read`, until the block ends.

    For each read, the kernel asks a fanotify(7) listener for permission. This listener does not
    answer until the end of the block. If this process ends, the kernel permits all reads. This
    process must not read the file within the block.

    The test is skipped without the right to listen (CAP_SYS_ADMIN), or if the kernel lacks
    fanotify.

    Yields:
        A function that waits until a process is held, and returns its id.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    flags = _FAN_CLASS_CONTENT | _FAN_CLOEXEC | _FAN_NONBLOCK
    listener = libc.fanotify_init(flags, os.O_RDONLY | os.O_CLOEXEC)
    if listener < 0:
        pytest.skip(f"fanotify_init: {os.strerror(ctypes.get_errno())}")
    held: list[tuple[int, int]] = []

    def collect(timeout_s: float = 0.0) -> bool:
        while select.select([listener], [], [], timeout_s)[0]:
            events = os.read(listener, 4096)
            held.extend((fd, pid) for *_, fd, pid in _EVENT.iter_unpack(events))
            timeout_s = 0.0
        return bool(held)

    def wait() -> int:
        until(collect)
        return held[0][1]

    try:
        mask = ctypes.c_uint64(_FAN_ACCESS_PERM)
        if libc.fanotify_mark(listener, _FAN_MARK_ADD, mask, _AT_FDCWD, os.fsencode(path)) < 0:
            pytest.skip(f"fanotify_mark: {os.strerror(ctypes.get_errno())}")
        yield wait
    finally:
        collect()
        for descriptor, _ in held:
            os.write(listener, _RESPONSE.pack(descriptor, _FAN_ALLOW))
            os.close(descriptor)
        os.close(listener)
