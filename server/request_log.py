"""Writes one log line for each request that has ended, for `--log-requests`."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

from runtime.client.client import EngineClient
from runtime.client.recorder import RequestRecord
from runtime.config.options import LoggingArgs
from runtime.requests.request_context import request_labels
from runtime.text.tokenizer import Tokenizer

logger = logging.getLogger("server.requests")

LEVELS = (0, 1, 2, 3)
# The most characters of a prompt and of an output in a line at level 2.
MAX_CHARS = 2048
_SAMPLING_LEVEL, _PART_LEVEL, _WHOLE_LEVEL = 1, 2, 3


class RequestLog:
    """Logs the records of requests that have ended. Its settings may change at any time.

    A record has the prompt's tokens, the sampling parameters, the output, token counts and times.
    It has no keys or headers.
    """

    def __init__(self, args: LoggingArgs, client: EngineClient, tokenizer: Tokenizer) -> None:
        """Begin to log, with the settings in `args`."""
        self._client = client
        self._tokenizer = tokenizer
        self.is_on = False
        self.level = args.log_requests_level
        self.format = args.log_format
        self.change(is_on=args.log_requests)

    def change(
        self, *, is_on: bool | None = None, level: int | None = None, form: str | None = None
    ) -> None:
        """Change the given settings.

        Args:
            is_on: whether requests are logged.
            level: how much of a request is logged, one of `LEVELS`; it applies to requests that
                begin later.
            form: `text` or `json`.
        """
        self.level = self.level if level is None else level
        self.format = self.format if form is None else form
        if is_on is not None and is_on != self.is_on:
            sinks = self._client.sinks
            sinks.append(self.log) if is_on else sinks.remove(self.log)
            self.is_on = is_on
            # The lines are written even if the server's log level is higher, because the operator
            # asked for them.
            logger.setLevel(logging.INFO if is_on else logging.NOTSET)
        self._client.keeps_text = self.is_on and self.level >= _PART_LEVEL

    def log(self, record: RequestRecord) -> None:
        """Write the line of a request."""
        facts = self._facts(record)
        if self.format == "json":
            # The line is only the JSON object, without time and level before it.
            _plain_logger().info(json.dumps(facts))
            return
        parts = " ".join(f"{name}={_readable(value)}" for name, value in facts.items())
        logger.info("request %s", parts)

    def _facts(self, record: RequestRecord) -> dict[str, Any]:
        # The answer of a request without `stream` comes at once, so it has no time to first token.
        ttft = record.ttft_s
        facts: dict[str, Any] = {
            "rid": record.rid,
            "prompt": record.prompt_tokens,
            "cached": record.cached_tokens,
            "output": record.completion_tokens,
            "ttft": round(ttft, 6) if record.is_streaming and ttft is not None else None,
            "e2e": round(record.e2e_s, 6),
            "end": record.outcome,
            "stream": record.is_streaming,
        }
        if self.format == "json":
            labels = request_labels(record.context)
            facts = {"time": datetime.now(UTC).isoformat(), **labels, **facts}
        if self.level >= _SAMPLING_LEVEL:
            facts["sampling"] = msgspec.to_builtins(record.sampling)
        if self.level >= _PART_LEVEL:
            most = None if self.level >= _WHOLE_LEVEL else MAX_CHARS
            # A token has at least one character (with rare exceptions), so as many ids as
            # characters suffice.
            ids = record.input_ids[:most]
            if self._tokenizer.is_missing:
                return facts
            facts["prompt_text"] = self._tokenizer.decode(ids, skip_special_tokens=False)[:most]
            facts["output_text"] = "".join(record.text)[:most]
        return facts


def _readable(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    # A text with spaces or control characters is quoted, so that it cannot start a new line.
    is_word = isinstance(value, str) and value.isprintable() and " " not in value
    return str(value) if is_word else json.dumps(value)


def _plain_logger() -> logging.Logger:
    plain = logging.getLogger("server.requests.json")
    if not plain.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        plain.addHandler(handler)
        plain.propagate = False
        plain.setLevel(logging.INFO)
    return plain
