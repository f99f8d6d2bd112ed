"""Configures the log of a process, in the same form for all processes.

Control characters in messages are escaped, so that a user's text cannot forge lines of the log.
"""

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
    """Formats a record as a line of text; escapes control characters, except in tracebacks."""

    def __init__(self, process_name: str) -> None:
        super().__init__(_FORMAT, _TIME_FORMAT, defaults={"process_name": process_name})
        self._second = 0
        self._time = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        # The time is formatted once per second, not for each line.
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
    """Formats a record as one JSON object; `extra={"fields": {...}}` of a record adds keys."""

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
    """Write a text that people and scripts wait for, at any log level."""
    (handler,) = logging.getLogger().handlers[:1]
    if isinstance(handler.formatter, _JsonFormatter):
        handler.handle(logging.LogRecord(__name__, logging.INFO, "", 0, text, None, None))
    else:
        sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def configure_logging(level: str, process_name: str, form: str = "text") -> None:
    """Write this process's log to standard error, without ever waiting for it to be read.

    Warnings and other writes to `sys.stderr` do not wait either.

    Args:
        level: lowest level that is written.
        process_name: name of this process, shown in each line.
        form: `text`; or `json` for one object per line.
    """
    queue_standard_error(process_name, is_json=form == "json")
    logging.captureWarnings(True)
    # Python would collect these facts for each record, but the formats do not show them.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(sys.stderr)
    is_json = form == "json"
    handler.setFormatter((_JsonFormatter if is_json else _OneLineFormatter)(process_name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
