"""The error table: every exception's status, and a body that two kinds of client can read.

OpenAI's clients read the nested `error` object; SGLang's read the flat keys beside it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.responses import Response

from runtime.errors import HeadraceError, TooLong

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 2000


@dataclass(frozen=True)
class _Kind:
    """How one status is called: nested in OpenAI's words, flat in SGLang's."""

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


class ModelNotFound(HeadraceError):
    """A model's card was asked for that this server does not serve."""

    status_code = 404

    def __init__(self, model: str) -> None:
        """Name the missing `model`, shortened: it came from outside."""
        super().__init__(f"The model {model[:128]!r} does not exist.", param="model")


class KeyRefused(HeadraceError):
    """The request's key does not open the route."""

    def __init__(self, *, is_known: bool) -> None:
        """403 for a known key where the admin key is needed, else 401."""
        if is_known:
            super().__init__("This route needs the admin key.")
            self.status_code = 403
        else:
            super().__init__("A valid API key is needed: Authorization: Bearer <key>.")
            self.status_code = 401


@dataclass(frozen=True)
class ErrorInfo:
    """An error as the wire shows it.

    Attributes:
        param: the request's field it is about, as the client wrote it.
        code: OpenAI's machine-readable word, if there is one.
        retry_after_s: when to come back, for overload.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None

    def body(self) -> dict[str, Any]:
        """OpenAI's nested object and the flat keys together."""
        kind = KINDS.get(self.status, KINDS[400 if self.status < 500 else 500])
        message = self.message[:MAX_MESSAGE_CHARS]
        return {
            "object": "error",
            "message": message,
            "type": kind.flat,
            "param": self.param,
            "code": self.status,
            "error": {
                "message": message,
                "type": kind.nested,
                "param": self.param,
                "code": self.code,
            },
        }


def describe_error(error: Exception) -> ErrorInfo:
    """Turn an exception into what the client may know of it.

    Errors raised on purpose carry their own text. Anything else is ours: it goes to the log under
    an id, and only the id leaves the server.
    """
    if isinstance(error, HeadraceError):
        return ErrorInfo(
            error.status_code, error.message, error.param, _code_of(error), error.retry_after_s
        )
    error_id = secrets.token_hex(6)
    logger.error("request failed, error id %s", error_id, exc_info=error)
    return ErrorInfo(500, f"Internal server error: the log has the details under id {error_id}.")


def _code_of(error: HeadraceError) -> str | None:
    if isinstance(error, ModelNotFound):
        return "model_not_found"
    if isinstance(error, TooLong):
        return "context_length_exceeded"
    if isinstance(error, KeyRefused) and error.status_code == 401:
        return "invalid_api_key"
    return None


def error_response(info: ErrorInfo) -> Response:
    """Answer with the error's status and body."""
    headers = {} if info.retry_after_s is None else {"Retry-After": str(info.retry_after_s)}
    return Response(
        orjson.dumps(info.body()), info.status, headers=headers, media_type="application/json"
    )


def error_event(info: ErrorInfo) -> bytes:
    """The error as an event of a stream that has already begun with status 200."""
    body = info.body()
    nested = body.pop("error")
    # Inside a stream both kinds of client look under `error`: OpenAI's keys win there.
    return b"data: " + orjson.dumps({**body, "error": {**body, **nested}}) + b"\n\n"
