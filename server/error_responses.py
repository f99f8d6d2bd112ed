"""Turns exceptions into HTTP responses, in the format of the route's API.

The native API has three formats. A value that a route refuses gives `{"error": {"message"}}`. An
insufficient key gives `{"error": "Forbidden"}` or `{"error": "Unauthorized"}`. Every other error
gives the flat `{"object": "error", ...}`. The formats of OpenAI's and Anthropic's APIs are in
`openai_api` and `anthropic_api`.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Literal, NotRequired, TypedDict

import orjson
from starlette.responses import Response

from anthropic_api import anthropic_errors
from ollama_api.ollama_answers import OllamaErrorBody
from ollama_api.ollama_lines import MAX_MESSAGE_CHARS
from openai_api import openai_errors
from runtime.errors import HeadraceError, InvalidRequest
from runtime.eventloop.body_errors import InvalidBody
from runtime.service.error_table import ErrorInfo, describe_error
from server.dialect import Dialect


class ErrorBody(TypedDict):
    """The flat body of a native error; `detail` is set for an unknown path or a wrong method."""

    object: Literal["error"]
    message: str
    type: str
    param: None
    code: int
    detail: NotRequired[str]


class Refused(TypedDict):
    """Why a route refuses a value."""

    message: str


class RefusedBody(TypedDict):
    """The body of a native error if a route refuses a value."""

    error: Refused


class KeyRefusedBody(TypedDict):
    """The body of a native error if the key is insufficient."""

    error: Literal["Unauthorized", "Forbidden"]


class StreamErrorDetail(TypedDict):
    """What went wrong in a native stream, and whether a retry may succeed."""

    message: str
    type: str
    code: int
    retryable: bool


class StreamErrorBody(TypedDict):
    """The event that ends a native stream if it fails after it has begun."""

    error: StreamErrorDetail


class BodyTooLarge(HeadraceError):
    """The request's body is larger than the server accepts."""

    status_code = 413


class UnsupportedEncoding(HeadraceError):
    """The request's body is compressed, which the server does not accept."""

    status_code = 415


class UnsupportedMediaType(HeadraceError):
    """The request's body is not declared to be JSON."""

    status_code = 415


class SlowBody(HeadraceError):
    """The request's body did not arrive in time."""

    # The status is not 408, because routers would then retry the request, with the same result.
    status_code = 400


class KeyRefused(HeadraceError):
    """The request's key does not open the route."""

    def __init__(self, *, is_known: bool) -> None:
        """Set the status: 403 if the key is known but not the admin key, else 401."""
        if is_known:
            super().__init__("This route needs the admin key.")
            self.status_code = 403
        else:
            super().__init__("A valid API key is needed: Authorization: Bearer <key>.")
            self.status_code, self.code = 401, "invalid_api_key"


class RouteNotFound(HeadraceError):
    """The path has no route."""

    status_code = 404

    def __init__(self, asked: str, instead: str | None = None) -> None:
        """Write a message about the method and path `asked`, and the alternative `instead`."""
        hint = f" Note: {instead}." if instead else ""
        super().__init__(f"Not found: {asked}.{hint}")


class MethodNotAllowed(HeadraceError):
    """The route does not answer this method."""

    status_code = 405

    def __init__(self, asked: str, allowed: str) -> None:
        """Write a message about the method and path `asked`, and the `allowed` methods."""
        super().__init__(f"Method not allowed: {asked}; allowed are {allowed}.")
        self.allowed = allowed


class HttpRefusal(HeadraceError):
    """A request that the web framework refuses."""

    def __init__(self, message: str, status_code: int) -> None:
        """Set the message and the status of the response."""
        super().__init__(message)
        self.status_code = status_code


class DecodeError(HeadraceError):
    """Token ids cannot be decoded to text."""

    status_code = 400


def json_response(content: Any, status_code: int = 200, **headers: str) -> Response:
    """Return a JSON response; `retry_after="1"` becomes the header `retry-after: 1`."""
    return Response(
        orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS),
        status_code,
        media_type="application/json",
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


def openai_error(error: Exception) -> Response:
    """Return the response for `error` in the format of OpenAI's API."""
    info = describe_error(error)
    return json_response(openai_errors.error_body(info), info.status, **_headers(info))


def anthropic_error(error: Exception) -> Response:
    """Return the response for `error` in the format of Anthropic's API."""
    info = describe_error(error)
    return json_response(anthropic_errors.error_body(info), info.status, **_headers(info))


def native_error(error: Exception) -> Response:
    """Return the response for `error` in the format of the native API."""
    info = describe_error(error)
    headers = _headers(info)
    if isinstance(error, InvalidRequest) and not isinstance(error, InvalidBody):
        refused: RefusedBody = {"error": {"message": info.message}}
        return json_response(refused, info.status, **headers)
    if isinstance(error, KeyRefused):
        word: KeyRefusedBody = {"error": "Unauthorized" if info.status == 401 else "Forbidden"}
        return json_response(word, info.status, **headers)
    body = _flat(info.message, _type_name(error), info.status)
    if isinstance(error, RouteNotFound | MethodNotAllowed):
        # SGLang's clients check this key.
        body["detail"] = HTTPStatus(info.status).phrase
    return json_response(body, info.status, **headers)


def ollama_error(error: Exception) -> Response:
    """Return the response for `error` in the format of Ollama's API."""
    info = describe_error(error)
    body: OllamaErrorBody = {"error": info.message[:MAX_MESSAGE_CHARS]}
    return json_response(body, info.status, **_headers(info))


_ANSWERS = {
    Dialect.NATIVE: native_error,
    Dialect.OPENAI: openai_error,
    Dialect.ANTHROPIC: anthropic_error,
    Dialect.OLLAMA: ollama_error,
}


def error_response(error: Exception, dialect: Dialect) -> Response:
    """Return the response for `error` in the format of the API `dialect`."""
    response = _ANSWERS[dialect](error)
    if isinstance(error, MethodNotAllowed):
        response.headers["allow"] = error.allowed
    elif isinstance(error, KeyRefused) and error.status_code == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


def stream_error(error: Exception) -> StreamErrorBody:
    """Return the last event of a native stream that fails after it has begun."""
    info = describe_error(error)
    return {
        "error": {
            "message": info.message,
            "type": _type_name(error),
            "code": info.status,
            "retryable": info.retry_after_s is not None,
        }
    }


def _headers(info: ErrorInfo) -> dict[str, str]:
    return {} if info.retry_after_s is None else {"retry_after": str(info.retry_after_s)}


def _type_name(error: Exception) -> str:
    if isinstance(error, InvalidBody):
        return "Bad Request"
    if isinstance(error, DecodeError):
        return "DecodeError"
    if not isinstance(error, HeadraceError) or error.status_code == 500:
        return "InternalServerError"
    return "BadRequest" if error.status_code == 400 else str(error.status_code)


def _flat(message: str, type_name: str, code: int) -> ErrorBody:
    return {"object": "error", "message": message, "type": type_name, "param": None, "code": code}
