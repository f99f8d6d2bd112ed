"""One log line per finished request, for `--log-requests`: numbers, and texts on request."""

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
# The number of characters of a prompt and of an output that level 2 shows.
MAX_CHARS = 2048
_SAMPLING_LEVEL, _PART_LEVEL, _WHOLE_LEVEL = 1, 2, 3


class RequestLog:
    """Logs the records of a request client. Its settings may change while requests run.

    Records do not contain keys or headers: they hold the prompt's tokens, the sampling parameters,
    the output and the numbers.
    """

    def __init__(self, args: LoggingArgs, client: EngineClient, tokenizer: Tokenizer) -> None:
        """Log as `args` specify, from now on."""
        self._client = client
        self._tokenizer = tokenizer
        self.is_on = False
        self.level = args.log_requests_level
        self.format = args.log_format
        self.change(is_on=args.log_requests)

    def change(
        self, *, is_on: bool | None = None, level: int | None = None, form: str | None = None
    ) -> None:
        """Set the given values, for requests that begin after this call."""
        self.level = self.level if level is None else level
        self.format = self.format if form is None else form
        if is_on is not None and is_on != self.is_on:
            sinks = self._client.sinks
            sinks.append(self.log) if is_on else sinks.remove(self.log)
            self.is_on = is_on
            # The operator requested these lines, so a server with a quieter log level still writes
            # them.
            logger.setLevel(logging.INFO if is_on else logging.NOTSET)
        self._client.keeps_text = self.is_on and self.level >= _PART_LEVEL

    def log(self, record: RequestRecord) -> None:
        """Write the line."""
        facts = self._facts(record)
        if self.format == "json":
            # The line has no time or level before the JSON object, so that it parses as JSON.
            _plain_logger().info(json.dumps(facts))
            return
        parts = " ".join(f"{name}={_readable(value)}" for name, value in facts.items())
        logger.info("request %s", parts)

    def _facts(self, record: RequestRecord) -> dict[str, Any]:
        # A client that does not stream gets all tokens at once, so it has no time to first token.
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
            # Apart from rare exceptions, a token has at least one character.
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
    # A line break or an escape sequence in a prompt must not start a new line.
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
