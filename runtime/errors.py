"""Exception types; each one names its HTTP status.

HeadraceError
|-- InvalidRequest   the caller's mistake            400
|   `-- TooLong        more tokens than fit
|-- Overloaded       more work than the queue takes  503, Retry-After
|-- EngineDead       an engine process died          503, Retry-After
|-- EngineNotReady   weights are still loading       503, Retry-After
|   `-- MemoryReleased   its memory was released
`-- StartupError     the server cannot start at all  exit code 1

`DeviceLost` is not a `HeadraceError`: it ends a worker, and no handler may catch it.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """The base class of this project's errors. Raised itself, it means an internal failure."""

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
    """The request is invalid; the message says what is wrong and what is allowed."""

    status_code = 400


class TooLong(InvalidRequest):
    """The request needs more tokens than the context or the KV pool holds."""

    code = "context_length_exceeded"


class Overloaded(HeadraceError):
    """The waiting queue is full, the server is draining, or the machine is too busy."""

    status_code = 503
    retry_after_s = 1


class EngineDead(HeadraceError):
    """A process of the engine died while it ran the request; the process is being restarted."""

    status_code = 503
    retry_after_s = 5


class EngineNotReady(HeadraceError):
    """The worker is still loading its model."""

    status_code = 503
    retry_after_s = 2


class MemoryReleased(EngineNotReady):
    """The engine's memory was released; `/resume_memory_occupation` allocates it again."""


class StartupError(HeadraceError):
    """The server cannot start; the message is one line that says why and what to do."""


class DeviceLost(BaseException):
    """The device has failed for good: the process must end, and a new one takes its place.

    Not an `Exception`: handlers that isolate the fault of one request must not catch it.

    Attributes:
        by_others: the end of another rank may be the cause; that rank's message says more.
    """

    def __init__(self, why: str, *, by_others: bool = False) -> None:
        """Create the error; `why` is its message, one line."""
        super().__init__(why)
        self.by_others = by_others
