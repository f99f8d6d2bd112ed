"""Makes standard error non-blocking: lines are queued, and a thread writes them.

A pipe that is not read, or a stopped terminal, blocks the process that writes to it. Writing to a
full device fails. None of these may stop a serving process. Lines that do not fit into the queue
are dropped and counted. When lines can be written again, an additional line reports the count.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import sys
import threading
import time
from collections import deque
from typing import NoReturn, TextIO

MAX_BYTES = 2**19
# Time for writing the last lines when a process ends, seconds.
DRAIN_S = 1.0
# Time to wait for further lines before writing, seconds: each write switches between threads that
# share the GIL.
_GATHER_S = 0.002


class QueuedText(io.TextIOBase):
    """A text stream whose `write` and `flush` never wait; a thread writes to the real stream.

    Attributes:
        process_name: name of the process, in the line that reports lost lines.
        is_json: whether this line is a JSON object.
    """

    process_name = "python"
    is_json = False
    encoding = "utf-8"

    def __init__(self, stream: TextIO, max_bytes: int = MAX_BYTES) -> None:
        """Write to the file descriptor of `stream`; at most `max_bytes` wait in the queue.

        Raises:
            OSError: `stream` has no file descriptor.
        """
        self._stream = stream
        self._descriptor = stream.fileno()
        self._max_bytes = max_bytes
        self._reset()
        # In a fork there is no writer thread, and the lock may have been copied while it was held.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._unfinished = ""
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        self._num_lost = 0
        self._writer: threading.Thread | None = None

    # ---- interface of a text stream ----

    def fileno(self) -> int:
        """Return the file descriptor, for writes that bypass the queue."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether the real stream is a terminal."""
        return self._stream.isatty()

    def writable(self) -> bool:
        """Return true, because the stream can always be written to."""
        return True

    def write(self, text: str) -> int:
        """Queue complete lines; an incomplete line waits for its end or for `flush`."""
        with self._changed:
            self._unfinished += text
            if text.endswith("\n") or len(self._unfinished) > self._max_bytes:
                self._queue()
        return len(text)

    def flush(self) -> None:
        """Queue the incomplete line, without waiting until it is written."""
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
        """Wait until all lines are written, for at most `timeout_s` seconds."""
        with self._changed:
            self._queue()
            self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
            time.sleep(_GATHER_S)
            with self._changed:
                # Lines stay in the queue until they are written, because `drain` waits for them.
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
            # The count of lost lines is reported after the lines that were queued before.
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
        text = f"{num_lost} lines of the log were lost: standard error did not take them."
        if self.is_json:
            line = {"level": "WARNING", "process": self.process_name, "message": text}
            return f"{json.dumps(line)}\n".encode()
        clock = time.strftime("%H:%M:%S")
        return f"{clock} WARNING [{self.process_name}] {text}\n".encode()


def queue_standard_error(process_name: str, *, is_json: bool = False) -> None:
    """Make this process's `sys.stderr` non-blocking, if it is a file, pipe or terminal.

    A second call only changes the name and the form.
    """
    if not isinstance(sys.stderr, QueuedText):
        try:
            queued = QueuedText(sys.stderr)
        except OSError:
            # `sys.stderr` is not a file: a notebook or a test has replaced it.
            return
        sys.stderr = queued
        atexit.register(queued.drain)
    sys.stderr.process_name = process_name
    sys.stderr.is_json = is_json


def drain_standard_error() -> None:
    """Wait briefly until the last lines are written, before an exit without clean-up."""
    if isinstance(sys.stderr, QueuedText):
        sys.stderr.drain()


def leave_at_once(status: int) -> NoReturn:
    """End the process at once with exit code `status`; first write the lines that are queued."""
    drain_standard_error()
    os._exit(status)


def _num_lines(data: bytes) -> int:
    return max(1, data.count(b"\n"))
