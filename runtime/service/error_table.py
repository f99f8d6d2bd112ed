"""What a client may know of an exception: one table, which each wire puts into its own words."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import HeadraceError
from runtime.requests.fault_domain import log_failure


@dataclass(frozen=True)
class ErrorInfo:
    """An error as clients learn of it.

    Attributes:
        status: HTTP's.
        param: the request's field that it is about, as the client wrote it.
        code: OpenAI's machine-readable word, if there is one.
        retry_after_s: when to come back, for overload.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None


def describe_error(error: Exception) -> ErrorInfo:
    """Turn an exception into what the client may know of it.

    Errors raised on purpose carry their own text. Anything else is ours: it goes to the log under
    an id, and only the id leaves the server.
    """
    if isinstance(error, HeadraceError):
        return ErrorInfo(
            error.status_code, error.message, error.param, error.code, error.retry_after_s
        )
    return ErrorInfo(500, log_failure("A request", error))
