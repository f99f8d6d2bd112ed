"""Logs of every process in one form; escape sequences in a user's text cannot forge lines."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from runtime.ipc.standard_error import queue_standard_error
from runtime.requests.request_context import REQUEST, request_labels

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


class _JsonFormatter(logging.Formatter):
    """One JSON object a line; `extra={"fields": {...}}` of a record adds keys."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process_name,
            "logger": record.name,
            "message": record.getMessage(),
            **request_labels(REQUEST.get()),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def announce(text: str) -> None:
    """Write lines that people and scripts wait for, whatever the log's level."""
    (handler,) = logging.getLogger().handlers[:1]
    if isinstance(handler.formatter, _JsonFormatter):
        handler.handle(logging.LogRecord(__name__, logging.INFO, "", 0, text, None, None))
    else:
        sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def configure_logging(level: str, process_name: str, form: str = "text") -> None:
    """Send this process's logs to standard error, each line naming `process_name`.

    Logging, warnings and writes to `sys.stderr` never wait for it to be read.

    Args:
        level: the lowest level that is written.
        process_name: named in each line.
        form: `text`, or `json` for one object a line.
    """
    queue_standard_error(process_name, is_json=form == "json")
    logging.captureWarnings(True)
    # Each record would look these up, but our format does not show them.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
    is_json = form == "json"
    handler.setFormatter((_JsonFormatter if is_json else _OneLineFormatter)(process_name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
