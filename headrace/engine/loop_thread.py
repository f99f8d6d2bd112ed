"""Runs an event loop on its own thread, so that callers may use any event loop or none."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_STOP_TIMEOUT_S = 5.0


class LoopClosed(RuntimeError):
    """The event loop was stopped and accepts no more coroutines."""


def _new_loop() -> asyncio.AbstractEventLoop:
    """Create an event loop of the kind that the server uses.

    The event loop policy is not asked, because the user's program may have changed it.
    """
    if sys.platform == "win32":
        return asyncio.SelectorEventLoop()
    import uvloop

    return uvloop.new_event_loop()


class LoopThread:
    """A thread with an event loop that runs coroutines for other threads until `stop`."""

    def __init__(self, name: str) -> None:
        """Start the thread and its event loop."""
        self._loop = _new_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Schedule `coroutine`; cancelling the future cancels it.

        Raises:
            LoopClosed: the loop was stopped.
        """
        with self._lock:
            if self._closed:
                coroutine.close()
                raise LoopClosed
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Schedule a call of `callback` on the loop's thread."""
        if self.is_current:
            self._loop.call_soon(callback, *args)
        else:
            self._loop.call_soon_threadsafe(callback, *args)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the loop and return its result; Ctrl-C while waiting cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def call_async(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the loop, and await its result in any other event loop."""
        return await asyncio.wrap_future(self.submit(coroutine))

    def stop(self, last: Coroutine[Any, Any, None]) -> None:
        """Run the coroutine `last`, wait for pending work, and end the thread.

        If the caller runs on this thread, as when an engine is garbage-collected on it, these steps
        are only scheduled.
        """
        with self._lock:
            if self._closed:
                last.close()
                return
            self._closed = True
            asyncio.run_coroutine_threadsafe(self._finish(last), self._loop)
        if not self.is_current:
            self._thread.join(2 * _STOP_TIMEOUT_S)

    async def _finish(self, last: Coroutine[Any, Any, None]) -> None:
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await last
                await self._others(cancel=False)
        except TimeoutError:
            await self._others(cancel=True)
        finally:
            self._loop.call_soon(self._loop.stop)

    async def _others(self, *, cancel: bool) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            if cancel:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
