"""The exceptions that an engine raises; they are translated from the errors of `runtime`.

A mistake in a request is a `ValueError`. Every other error is an `EngineError`, which is a
`RuntimeError`.
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
    """The engine failed to answer a valid call."""


class EngineStartError(EngineError):
    """The engine could not start; the message gives the reason and a process's last output."""


class EngineDeadError(EngineError):
    """A process of the engine ended, or the engine was shut down; create a new engine."""


class EngineOverloadedError(EngineError):
    """The request was refused, because `max_queued_requests` requests are waiting already."""


class FeatureNotSupportedError(AttributeError, NotImplementedError):
    """A method of SGLang's engine was used that this engine does not have yet.

    It is an `AttributeError`, so that `hasattr(engine, name)` is false.
    """


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Return a context manager that converts errors of `runtime` to exceptions of this module."""
    try:
        yield
    except HeadraceError as error:
        raise translate(error) from None


def translate(error: HeadraceError) -> Exception:
    """Return the exception of this module for an error of `runtime`."""
    match error:
        case InvalidRequest():
            return ValueError(error.message)
        case StartupError():
            # The message names command-line options; here they are the engine's keyword arguments.
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
