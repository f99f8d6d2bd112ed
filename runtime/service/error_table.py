"""What a client may know of an exception: one table, which each wire puts into its own words."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass

from runtime.errors import HeadraceError

logger = logging.getLogger(__name__)


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
    error_id = secrets.token_hex(6)
    logger.error("request failed, error id %s", error_id, exc_info=error)
    return ErrorInfo(500, f"Internal server error: the log has the details under id {error_id}.")
