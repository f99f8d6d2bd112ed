"""Checks the lines of OpenAI's batch input files, and makes the lines of output files."""

from __future__ import annotations

import secrets
from typing import Any

from openai_api.openai_errors import error_body
from runtime.service.error_table import describe_error

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_KEYS = frozenset({"custom_id", "method", "url", "body"})
# Fields that request an answer which is not one line, or which comes later.
_LATER = ("stream", "background")


class BadLine(ValueError):
    """A line of the input is not a valid request.

    Attributes:
        code: OpenAI's error code.
        param: the wrong part of the line.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        """Store the error's code, message and field."""
        super().__init__(message)
        self.code = code
        self.param = param


def check_line(request: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Check a line (`custom_id`, `method`, `url`, `body`); return its path and body.

    Raises:
        BadLine: a part is missing or invalid.
    """
    unknown = sorted(set(request) - _KEYS)
    if unknown:
        known = ", ".join(sorted(_KEYS))
        raise BadLine("unknown_parameter", f"Unknown key {unknown[0][:64]!r}; known are {known}.")
    if not isinstance(request.get("custom_id"), str):
        raise BadLine(
            "invalid_custom_id",
            "custom_id must be a string: it identifies the answer.",
            "custom_id",
        )
    if request.get("method", "POST") != "POST":
        shown = str(request["method"])[:32]
        raise BadLine("invalid_method", f"method must be POST, got {shown!r}.", "method")
    url, body = request.get("url"), request.get("body")
    if not isinstance(url, str) or url not in URLS:
        known = ", ".join(URLS)
        raise BadLine("invalid_url", f"url must be one of {known}, got {str(url)[:64]!r}.", "url")
    if not isinstance(body, dict):
        raise BadLine("invalid_body", "body must be a JSON object.", "body")
    for name in _LATER:
        if body.get(name):
            raise BadLine(
                "invalid_body",
                f"{name} is not possible in a batch: an answer is one line.",
                f"body.{name}",
            )
    return url, body


def refused(error: Exception) -> dict[str, Any]:
    """Return the object `response` of the output line of a request that failed."""
    info = describe_error(error)
    return response_of(info.status, error_body(info))


def response_of(status: int, content: Any) -> dict[str, Any]:
    """Return the object `response` of an output line."""
    return {"status_code": status, "request_id": secrets.token_hex(16), "body": content}
