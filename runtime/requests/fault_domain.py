"""Makes each request a fault domain: an exception while one is handled ends only that request."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

R = TypeVar("R")

logger = logging.getLogger(__name__)


def log_failure(what: object, error: BaseException) -> str:
    """Log that `what` failed, under a new id; return a message for the client with only the id."""
    error_id = secrets.token_hex(6)
    logger.error("%s failed, error id %s", what, error_id, exc_info=error)
    return f"Internal server error: the log has the details under id {error_id}."


class FaultDomains(Generic[R]):
    """Ends only the request whose handling raised an exception; the calling loop continues.

    In code that runs for every token, `try` with `failed` does the same and saves the cost of
    `with`.

    Attributes:
        num_faults: number of requests that were ended so far.
    """

    def __init__(self, end: Callable[[R, str], None]) -> None:
        """Set the function that ends a request, in any state, with a message for its client.

        Exceptions of `end` are not caught.
        """
        self._end = end
        self.num_faults = 0

    def of(self, request: R) -> _FaultDomain[R]:
        """Return a context manager for handling `request`; an exception in it ends the request."""
        return _FaultDomain(self, request)

    def failed(self, request: R, error: Exception) -> None:
        """End `request`, whose handling raised `error`."""
        self.num_faults += 1
        self._end(request, log_failure(f"Request {request}", error))


class _FaultDomain(Generic[R]):
    __slots__ = ("_domains", "_request")

    def __init__(self, domains: FaultDomains[R], request: R) -> None:
        self._domains = domains
        self._request = request

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            # No exception was raised, or one that must end the process, such as `DeviceLost` or
            # `KeyboardInterrupt`.
            return False
        self._domains.failed(self._request, error)
        return True
