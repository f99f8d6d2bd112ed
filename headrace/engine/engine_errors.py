"""What an engine raises: the runtime's errors in the words of a Python library.

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
    """An engine could not do what a legal call asked for."""


class EngineStartError(EngineError):
    """The engine could not start; the message says why, with the child's own last words."""


class EngineDeadError(EngineError):
    """A process of the engine ended, or the engine was shut down; make a new one."""


class EngineOverloadedError(EngineError):
    """More requests wait than `max_queued_requests` allows."""


class FeatureNotSupportedError(AttributeError, NotImplementedError):
    """A method of the reference that this engine does not have yet.

    An `AttributeError`, so that `hasattr(engine, name)` tells the truth.
    """


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Raise the library's errors in place of the runtime's."""
    try:
        yield
    except HeadraceError as error:
        raise translate(error) from None


def translate(error: HeadraceError) -> Exception:
    """The library's error for one of the runtime's."""
    match error:
        case InvalidRequest():
            return ValueError(error.message)
        case StartupError():
            # The checks speak of command-line options; here they are keyword arguments.
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
