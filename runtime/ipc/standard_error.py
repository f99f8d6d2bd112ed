"""Standard error that never blocks: a bounded queue, and a thread that writes.

A pipe that is not read and a stopped terminal block the writer, and a full device fails. Neither a
pipe, nor a terminal, nor a device may stop a serving process. Lines that do not fit are dropped and
counted. Once a line is written again, a further line reports the count.
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
# Time to write the last lines of a process that ends.
DRAIN_S = 1.0
# Lines that come this soon after a line are written with it: each waking of the writer switches
# threads that share the GIL.
_GATHER_S = 0.002


class QueuedText(io.TextIOBase):
    """A text stream in front of another one's file descriptor; `write` and `flush` never wait.

    Attributes:
        process_name: named in the line that reports lost lines.
        is_json: whether that line is a JSON object.
    """

    process_name = "python"
    is_json = False
    encoding = "utf-8"

    def __init__(self, stream: TextIO, max_bytes: int = MAX_BYTES) -> None:
        """Write to the file descriptor of `stream`; at most `max_bytes` wait.

        Raises:
            OSError: `stream` has no file descriptor.
        """
        self._stream = stream
        self._descriptor = stream.fileno()
        self._max_bytes = max_bytes
        self._reset()
        # A fork has no writer thread yet, and may have copied a held lock.
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
        """The descriptor, for writes that bypass the queue."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether the stream behind the queue is a terminal."""
        return self._stream.isatty()

    def writable(self) -> bool:
        """Return true: the stream can always be written to."""
        return True

    def write(self, text: str) -> int:
        """Queue whole lines; an unfinished line waits for its end or for `flush`."""
        with self._changed:
            self._unfinished += text
            if text.endswith("\n") or len(self._unfinished) > self._max_bytes:
                self._queue()
        return len(text)

    def flush(self) -> None:
        """Queue the unfinished line; does not wait until it is written."""
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
                # Lines stay in the queue until they are written: a drain waits for them.
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
            # The notice follows lines queued before it, or comes as soon as writing works again.
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
    """Put the queue before this process's `sys.stderr`, once; only if that is a file."""
    if not isinstance(sys.stderr, QueuedText):
        try:
            queued = QueuedText(sys.stderr)
        except OSError:
            # Not a file: a notebook or a test shows it.
            return
        sys.stderr = queued
        atexit.register(queued.drain)
    sys.stderr.process_name = process_name
    sys.stderr.is_json = is_json


def drain_standard_error() -> None:
    """Wait briefly for the last lines, before an exit without clean-up."""
    if isinstance(sys.stderr, QueuedText):
        sys.stderr.drain()


def leave_at_once(status: int) -> NoReturn:
    """Exit without any clean-up except writing the last lines."""
    drain_standard_error()
    os._exit(status)


def _num_lines(data: bytes) -> int:
    return max(1, data.count(b"\n"))
