"""Logs of every process in one form; escape sequences in a user's text cannot forge lines."""

from __future__ import annotations

import logging
import sys

from runtime.ipc.standard_error import queue_standard_error

_TIME_FORMAT = "%H:%M:%S"
_FORMAT = "%(asctime)s %(levelname)-7s [%(process_name)s] %(message)s"


class _OneLineFormatter(logging.Formatter):
    """Escapes control characters of the message; tracebacks keep their lines."""

    def __init__(self, process_name: str) -> None:
        super().__init__(_FORMAT, _TIME_FORMAT, defaults={"process_name": process_name})
        self._second = 0
        self._time = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        # Formatted once a second, not for each line.
        if int(record.created) != self._second:
            self._second = int(record.created)
            self._time = super().formatTime(record, datefmt)
        return self._time

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's own name
        if not record.message.isprintable():
            record.message = "".join(
                c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode()
                for c in record.message
            )
        return super().formatMessage(record)


def configure_logging(level: str, process_name: str) -> None:
    """Send this process's logs to standard error, each line naming `process_name`.

    Logging, warnings and writes to `sys.stderr` never wait for it to be read.
    """
    queue_standard_error(process_name)
    logging.captureWarnings(True)
    # Each record would look these up, but our format does not show them.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLineFormatter(process_name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
