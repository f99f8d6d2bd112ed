"""Makes methods from coroutines of the engine's loop, callable from any thread or loop."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from headrace.engine.core import EngineCore
from headrace.engine.engine_errors import translated


class OwnsCore(Protocol):
    """A class whose methods run on the loop of its `EngineCore`."""

    _core: EngineCore


P = ParamSpec("P")
S = TypeVar("S", bound=OwnsCore)
T = TypeVar("T")


def waiting(
    work: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], T]:
    """Make a method that runs `work` on the engine's loop and waits; Ctrl-C cancels `work`.

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
    """Make the awaitable form of a `waiting` method, for any loop; cancelling aborts the work."""
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
