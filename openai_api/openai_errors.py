"""The errors of the OpenAI API, in one body for both OpenAI's and SGLang's clients.

OpenAI's clients read the nested object `error`. SGLang's clients read the keys beside it.
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
    """The body of an error response; the keys besides `error` are for SGLang's clients."""

    object: Literal["error"]
    message: str
    type: str
    param: str | None
    code: int
    error: OpenAIErrorDetail


class StreamedErrorDetail(TypedDict):
    """The object `error` in a stream's error event, which both kinds of clients read.

    `code` is OpenAI's error code.
    """

    object: Literal["error"]
    message: str
    type: str
    param: str | None
    code: str | None


class StreamedErrorBody(TypedDict):
    """The data of the error event that ends a stream."""

    object: Literal["error"]
    message: str
    type: str
    param: str | None
    code: int
    error: StreamedErrorDetail


@dataclass(frozen=True)
class _Kind:
    """The names of an error type for one HTTP status.

    Attributes:
        nested: OpenAI's name, in the nested object.
        flat: SGLang's name, in the keys beside it.
    """

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
    """Return the error as an event of a stream that has already begun with status 200."""
    body = error_body(describe_error(error))
    # In a stream, both kinds of clients read `error`, so it has the keys that both need.
    detail: StreamedErrorDetail = {"object": body["object"], **body["error"]}
    streamed: StreamedErrorBody = {**body, "error": detail}
    return b"data: " + orjson.dumps(streamed) + b"\n\n"


def error_body(info: ErrorInfo) -> OpenAIErrorBody:
    """Return the body of an error response."""
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
