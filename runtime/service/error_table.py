"""Maps each exception to the error that a client sees.

Each API (OpenAI, Anthropic, Ollama, native) then writes that error in its own format.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import HeadraceError
from runtime.requests.fault_domain import log_failure


@dataclass(frozen=True)
class ErrorInfo:
    """An error as clients see it.

    Attributes:
        status: the HTTP status.
        message: the text for the client.
        param: the wrong field of the request, by the name that the client used.
        code: OpenAI's machine-readable error code, if there is one.
        retry_after_s: seconds after which a retry may succeed, if the server is overloaded.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None


def describe_error(error: Exception) -> ErrorInfo:
    """Turn an exception into the error that the client sees.

    A `HeadraceError` is raised on purpose and has a text for the client. Any other exception is a
    bug: it is logged under an id, and the client gets only the id.
    """
    if isinstance(error, HeadraceError):
        return ErrorInfo(
            error.status_code, error.message, error.param, error.code, error.retry_after_s
        )
    return ErrorInfo(500, log_failure("A request", error))
