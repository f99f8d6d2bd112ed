"""Errors on the OpenAI wire: one body serves OpenAI's clients and SGLang's.

OpenAI's clients read the nested `error` object; SGLang's read the flat keys beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypedDict

import orjson

from runtime.service.error_table import ErrorInfo, describe_error

MAX_MESSAGE_CHARS = 2000


class OpenAIErrorDetail(TypedDict):
    """The nested object that OpenAI's clients read."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIErrorBody(TypedDict):
    """An error's body."""

    object: Literal["error"]
    message: str
    type: str
    param: str | None
    code: int
    error: OpenAIErrorDetail


class StreamedErrorDetail(TypedDict):
    """The error of a stream, for both kinds of client; `code` is OpenAI's."""

    object: Literal["error"]
    message: str
    type: str
    param: str | None
    code: str | None


class StreamedErrorBody(TypedDict):
    """The error event that ends a stream."""

    object: Literal["error"]
    message: str
    type: str
    param: str | None
    code: int
    error: StreamedErrorDetail


@dataclass(frozen=True)
class _Kind:
    """The names of one status: OpenAI's in the nested object, SGLang's in the flat keys."""

    nested: str
    flat: str


KINDS: Mapping[int, _Kind] = {
    400: _Kind("invalid_request_error", "BadRequestError"),
    401: _Kind("authentication_error", "AuthenticationError"),
    403: _Kind("permission_error", "PermissionDeniedError"),
    404: _Kind("invalid_request_error", "NotFoundError"),
    405: _Kind("invalid_request_error", "MethodNotAllowedError"),
    413: _Kind("invalid_request_error", "RequestTooLargeError"),
    415: _Kind("invalid_request_error", "UnsupportedMediaTypeError"),
    429: _Kind("rate_limit_error", "RateLimitError"),
    500: _Kind("server_error", "InternalServerError"),
    501: _Kind("server_error", "NotImplementedError"),
    503: _Kind("server_error", "SERVICE_UNAVAILABLE"),
}


def error_event(error: Exception) -> bytes:
    """The error as an event of a stream that has already begun with status 200."""
    body = error_body(describe_error(error))
    # In a stream both kinds of client read `error`, so it has OpenAI's keys.
    detail: StreamedErrorDetail = {"object": body["object"], **body["error"]}
    streamed: StreamedErrorBody = {**body, "error": detail}
    return b"data: " + orjson.dumps(streamed) + b"\n\n"


def error_body(info: ErrorInfo) -> OpenAIErrorBody:
    """Build the body with OpenAI's nested object and SGLang's flat keys."""
    kind = KINDS.get(info.status, KINDS[400 if info.status < 500 else 500])
    message = info.message[:MAX_MESSAGE_CHARS]
    return {
        "object": "error",
        "message": message,
        "type": kind.flat,
        "param": info.param,
        "code": info.status,
        "error": {
            "message": message,
            "type": kind.nested,
            "param": info.param,
            "code": info.code,
        },
    }
