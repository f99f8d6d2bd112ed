"""The exceptions that an engine raises, translated from the runtime's errors.

A mistake in a request is a `ValueError`; the rest are `EngineError`, a `RuntimeError`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from runtime.errors import (
    EngineDead,
    EngineNotReady,
    HeadraceError,
    InvalidRequest,
    MemoryReleased,
    Overloaded,
    StartupError,
)

_OPTION = re.compile(r"--([a-z][a-z0-9-]+)")


class EngineError(RuntimeError):
    """An engine could not do what a valid call requested."""


class EngineStartError(EngineError):
    """The engine could not start; the message says why and quotes the child's last output."""


class EngineDeadError(EngineError):
    """A process of the engine ended, or the engine was shut down; create a new one."""


class EngineOverloadedError(EngineError):
    """The number of waiting requests would exceed `max_queued_requests`."""


class FeatureNotSupportedError(AttributeError, NotImplementedError):
    """A method of the reference that this engine does not have yet.

    An `AttributeError`, so that `hasattr(engine, name)` is false.
    """


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise the library's errors in place of the runtime's."""
    try:
        yield
    except HeadraceError as error:
        raise translate(error) from None


def translate(error: HeadraceError) -> Exception:
    """The library's exception for a runtime error."""
    match error:
        case InvalidRequest():
            return ValueError(error.message)
        case StartupError():
            # The messages name command-line options, which are keyword arguments of the engine.
            return EngineStartError(_OPTION.sub(_as_keyword, error.message))
        case MemoryReleased():
            return EngineError(error.message)
        case EngineDead() | EngineNotReady():
            return EngineDeadError(error.message)
        case Overloaded():
            return EngineOverloadedError(error.message)
        case _:
            return EngineError(error.message)


def _as_keyword(match: re.Match[str]) -> str:
    return match[1].replace("-", "_")
