"""Errors in the form that Anthropic's clients read."""

from __future__ import annotations

from collections.abc import Mapping

from anthropic_api.message_answers import AnthropicErrorBody
from anthropic_api.named_events import message_event
from runtime.service.error_table import ErrorInfo, describe_error
from runtime.service.generation import Chunk

MAX_MESSAGE_CHARS = 2000
KINDS: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(info: ErrorInfo) -> AnthropicErrorBody:
    """Return the body of an error response."""
    kind = KINDS.get(info.status, KINDS[400] if info.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": info.message[:MAX_MESSAGE_CHARS]}}


def error_event(error: Exception) -> Chunk:
    """Return the error as an event of a stream that has already begun with status 200."""
    return message_event(error_body(describe_error(error)))
