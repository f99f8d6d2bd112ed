"""Maps exceptions to the errors that clients see, in one table.

Each wire converts them to its format.
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
        param: the request field at fault, as the client wrote it.
        code: OpenAI's machine-readable error code, if there is one.
        retry_after_s: seconds until a retry makes sense, on overload.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None


def describe_error(error: Exception) -> ErrorInfo:
    """Turn an exception into the error that the client sees.

    Errors raised on purpose carry their own text. Any other exception is a bug: it is logged under
    an id, and the client gets only the id.
    """
    if isinstance(error, HeadraceError):
        return ErrorInfo(
            error.status_code, error.message, error.param, error.code, error.retry_after_s
        )
    return ErrorInfo(500, log_failure("A request", error))
