"""Errors become answers: the native family's one table, and the choice of family by route.

Native bodies: `{"error": {"message"}}` for a value that a route refuses, `{"error": "Forbidden"}`
and the like for a key that does not suffice, else the flat `{"object": "error", ...}`.
Routes under `/v1/` speak OpenAI's dialect, whose table is `openai_api`'s.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

import orjson
from starlette.responses import Response

from openai_api import errors as openai_errors
from openai_api.errors import KeyRefused
from runtime.client.json_body import InvalidBody
from runtime.errors import HeadraceError, InvalidRequest

logger = logging.getLogger(__name__)

INTERNAL_ERROR = "Internal server error: the request failed and the log says why."


class BodyTooLarge(HeadraceError):
    """The request's body is larger than the server takes."""

    status_code = 413


class UnsupportedEncoding(HeadraceError):
    """The request's body is compressed; nothing is unpacked on a client's word."""

    status_code = 415


class SlowBody(HeadraceError):
    """The request's body did not arrive in time."""

    # Not 408: routers send such a request again, to the same end.
    status_code = 400


class RouteNotFound(HeadraceError):
    """No route has this path."""

    status_code = 404

    def __init__(self, asked: str) -> None:
        """Name the method and path that were `asked` for."""
        super().__init__(f"Not found: {asked}.")


class MethodNotAllowed(HeadraceError):
    """The route does not answer this method."""

    status_code = 405

    def __init__(self, asked: str, allowed: str) -> None:
        """Name the method and path that were `asked` for, and the methods that are `allowed`."""
        super().__init__(f"Method not allowed: {asked}; allowed are {allowed}.")


class HttpRefusal(HeadraceError):
    """A refusal of the framework."""

    def __init__(self, message: str, status_code: int) -> None:
        """Answer with `status_code`."""
        super().__init__(message)
        self.status_code = status_code


class DecodeError(HeadraceError):
    """Token ids that no text belongs to."""

    status_code = 400


def json_response(content: Any, status_code: int = 200, **headers: str) -> Response:
    """A JSON answer; `retry_after="1"` becomes the header `retry-after: 1`."""
    return Response(
        orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS),
        status_code,
        media_type="application/json",
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


def native_error(error: Exception) -> Response:
    """The native family's answer to `error`."""
    if not isinstance(error, HeadraceError):
        logger.error("A native route failed", exc_info=error)
        return json_response(_flat(INTERNAL_ERROR, "InternalServerError", 500), 500)
    status_code = error.status_code
    headers = {}
    if error.retry_after_s is not None:
        headers["retry_after"] = str(error.retry_after_s)
    if isinstance(error, InvalidRequest) and not isinstance(error, InvalidBody):
        body: dict[str, Any] = {"error": {"message": error.message}}
    elif isinstance(error, KeyRefused):
        body = {"error": "Unauthorized" if status_code == 401 else "Forbidden"}
    else:
        body = _flat(error.message, _type_name(error), status_code)
    if isinstance(error, RouteNotFound | MethodNotAllowed):
        # What clients of the reference look for.
        body["detail"] = HTTPStatus(status_code).phrase
    return json_response(body, status_code, **headers)


def error_response(error: Exception, *, speaks_openai: bool) -> Response:
    """The answer to `error` in the dialect of the route."""
    if speaks_openai:
        return openai_errors.error_response(openai_errors.describe_error(error))
    return native_error(error)


def stream_error(error: Exception) -> dict[str, Any]:
    """The event that ends a native stream which had begun before `error` came."""
    if isinstance(error, HeadraceError):
        code, message = error.status_code, error.message
        retryable = error.retry_after_s is not None
    else:
        logger.error("A native stream failed", exc_info=error)
        code, message, retryable = 500, INTERNAL_ERROR, False
    return {
        "error": {
            "message": message,
            "type": _type_name(error),
            "code": code,
            "retryable": retryable,
        }
    }


def _type_name(error: Exception) -> str:
    if isinstance(error, InvalidBody):
        return "Bad Request"
    if isinstance(error, DecodeError):
        return "DecodeError"
    if not isinstance(error, HeadraceError) or error.status_code == 500:
        return "InternalServerError"
    return "BadRequest" if error.status_code == 400 else str(error.status_code)


def _flat(message: str, type_name: str, code: int) -> dict[str, Any]:
    return {"object": "error", "message": message, "type": type_name, "param": None, "code": code}
