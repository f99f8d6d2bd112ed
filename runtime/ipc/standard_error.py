"""Standard error that nobody has to wait for: a bounded queue, and a thread that writes.

A pipe that is not read and a stopped terminal block the writer, a full device fails; none of that
may hold a process that serves. What finds no room is dropped and counted; once something is written
again, one line says how much it was.
"""

from __future__ import annotations

import atexit
import io
import os
import sys
import threading
import time
from collections import deque
from typing import NoReturn, TextIO

MAX_BYTES = 2**19
# For the last lines of a process that ends.
DRAIN_S = 1.0
# What comes so soon after a line is written with it: each waking of the writer is a switch of
# threads that share the GIL.
_GATHER_S = 0.002


class QueuedText(io.TextIOBase):
    """A text stream in front of another one's file descriptor; `write` and `flush` never wait.

    Attributes:
        process_name: who lost lines, where the count of them is written.
    """

    process_name = "python"
    encoding = "utf-8"

    def __init__(self, stream: TextIO, max_bytes: int = MAX_BYTES) -> None:
        """Write to the file descriptor of `stream`; at most `max_bytes` wait.

        Raises:
            OSError: `stream` has none.
        """
        self._stream = stream
        self._descriptor = stream.fileno()
        self._max_bytes = max_bytes
        self._reset()
        # A fork has no writer of its own yet, and may have copied a lock that is held.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._unfinished = ""
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        self._num_lost = 0
        self._writer: threading.Thread | None = None

    # ---- what a text stream has ----

    def fileno(self) -> int:
        """The descriptor, for who writes past the queue."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream.isatty()

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, text: str) -> int:
        """Queue whole lines; what has no end yet waits for it or for `flush`."""
        with self._changed:
            self._unfinished += text
            if text.endswith("\n") or len(self._unfinished) > self._max_bytes:
                self._queue()
        return len(text)

    def flush(self) -> None:
        """Queue what has no line end; does not wait until it is written."""
        with self._changed:
            self._queue()

    # ---- the queue ----

    def _queue(self) -> None:
        data = self._unfinished.encode(errors="backslashreplace")
        self._unfinished = ""
        if not data:
            return
        if self._waiting and self._num_bytes + len(data) > self._max_bytes:
            self._num_lost += _num_lines(data)
            return
        self._waiting.append(data)
        self._num_bytes += len(data)
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, name="log-writer", daemon=True)
            self._writer.start()
        self._changed.notify_all()

    def drain(self, timeout_s: float = DRAIN_S) -> None:
        """Wait until everything is written, or for `timeout_s`."""
        with self._changed:
            self._queue()
            self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
            time.sleep(_GATHER_S)
            with self._changed:
                # They stay until they are written: a drain waits for them.
                num_parts = len(self._waiting)
                data = b"".join(self._waiting)
            is_written = self._write_through(data)
            with self._changed:
                for _ in range(num_parts):
                    self._waiting.popleft()
                self._num_bytes -= len(data)
                self._num_lost += 0 if is_written else _num_lines(data)
                num_lost, is_last = self._num_lost, not self._waiting
                self._changed.notify_all()
            # Behind what was queued before them, or as soon as a failure has passed.
            if num_lost and is_written and is_last and self._write_through(self._notice(num_lost)):
                with self._changed:
                    self._num_lost -= num_lost

    def _write_through(self, data: bytes) -> bool:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError:
            return False
        return True

    def _notice(self, num_lost: int) -> bytes:
        clock = time.strftime("%H:%M:%S")
        text = "lines of the log were lost: standard error did not take them."
        return f"{clock} WARNING [{self.process_name}] {num_lost} {text}\n".encode()


def queue_standard_error(process_name: str) -> None:
    """Put the queue before this process's `sys.stderr`, once; not where that is no file."""
    if not isinstance(sys.stderr, QueuedText):
        try:
            queued = QueuedText(sys.stderr)
        except OSError:
            # A notebook or a test shows it.
            return
        sys.stderr = queued
        atexit.register(queued.drain)
    sys.stderr.process_name = process_name


def drain_standard_error() -> None:
    """Give the last lines a moment, before an end without clean-up."""
    if isinstance(sys.stderr, QueuedText):
        sys.stderr.drain()


def leave_at_once(status: int) -> NoReturn:
    """End this process without any clean-up but that of its last words."""
    drain_standard_error()
    os._exit(status)


def _num_lines(data: bytes) -> int:
    return max(1, data.count(b"\n"))
