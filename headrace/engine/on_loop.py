"""Decorators that make a coroutine method callable from any thread or any event loop.

The coroutine itself always runs on the engine's own event loop.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from headrace.engine.core import EngineCore
from headrace.engine.engine_errors import translated


class OwnsCore(Protocol):
    """An object with an `EngineCore`, on whose event loop its coroutine methods run."""

    _core: EngineCore


P = ParamSpec("P")
S = TypeVar("S", bound=OwnsCore)
T = TypeVar("T")


def waiting(
    work: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], T]:
    """Make a blocking method of the coroutine method `work`.

    The method runs `work` on the engine's loop and waits for its result; Ctrl-C cancels `work`.

    Raises:
        EngineDeadError: a process of the engine died, or the engine was shut down.
    """

    @functools.wraps(work)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._core.call(_alive(self._core, work, self, *args, **kwargs))

    return call


def awaited(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Make the awaitable form of a method that `waiting` has made.

    It may be awaited in any event loop; cancelling it cancels the work on the engine's loop.
    """
    work = inspect.unwrap(method)

    @functools.wraps(work)
    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._core.call_async(_alive(self._core, work, self, *args, **kwargs))

    return call


async def _alive(
    core: EngineCore, work: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
) -> T:
    with translated():
        core.check_alive()
        return await work(*args, **kwargs)
