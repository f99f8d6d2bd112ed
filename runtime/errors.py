"""What can go wrong, as types: one place decides which HTTP status each one becomes.

HeadraceError
|-- InvalidRequest   the caller's mistake            400
|   `-- TooLong        more tokens than fit
|-- Overloaded       more work than the queue takes  503, Retry-After
|-- EngineDead       a process behind the front died 503, Retry-After
|-- EngineNotReady   weights are still loading       503, Retry-After
|   `-- MemoryReleased   somebody gave the memory back
`-- StartupError     the server cannot start at all  exit code 1

`DeviceLost` stands apart: it ends a worker, and nobody may hold it up.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Root of every error raised on purpose."""

    status_code = 500
    retry_after_s: int | None = None
    # OpenAI's machine-readable word, where it has one.
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        """Keep `message` for the client and `param`, the request field it is about."""
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(HeadraceError):
    """The request cannot be served as asked; the message says what is wrong and what is allowed."""

    status_code = 400


class TooLong(InvalidRequest):
    """The request needs more tokens than the context or the KV pool holds."""

    code = "context_length_exceeded"


class Overloaded(HeadraceError):
    """The waiting queue is full, the server is draining, or the machine is too busy for it."""

    status_code = 503
    retry_after_s = 1


class EngineDead(HeadraceError):
    """A process behind the front died while the request was in flight; it is being restarted."""

    status_code = 503
    retry_after_s = 5


class EngineNotReady(HeadraceError):
    """The worker is still loading its model."""

    status_code = 503
    retry_after_s = 2


class MemoryReleased(EngineNotReady):
    """The engine's memory was given back, and somebody has to resume it."""


class StartupError(HeadraceError):
    """The server cannot start; one line says why and what to do."""


class DeviceLost(BaseException):
    """The device has failed for good: the process must end, and a new one takes its place.

    Not an `Exception`: what isolates the fault of one request must not hold this one up.

    Attributes:
        by_others: another rank's end may be the cause, and its words would say more.
    """

    def __init__(self, why: str, *, by_others: bool = False) -> None:
        """Say `why`, in one line."""
        super().__init__(why)
        self.by_others = by_others
