"""An event loop on its own thread, so that callers may use any event loop or none."""

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
    """The loop accepts no more work."""


def _new_loop() -> asyncio.AbstractEventLoop:
    """Create a loop of the server's kind. The policy is ignored: it is the user's program's."""
    if sys.platform == "win32":
        return asyncio.SelectorEventLoop()
    import uvloop

    return uvloop.new_event_loop()


class LoopThread:
    """Runs coroutines for other threads until it is stopped."""

    def __init__(self, name: str) -> None:
        """Start the thread."""
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
        """Whether the caller is on this thread."""
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
        """Call `callback` on the loop's thread. A caller on that thread causes no wake-up."""
        if self.is_current:
            self._loop.call_soon(callback, *args)
        else:
            self._loop.call_soon_threadsafe(callback, *args)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` and wait for it; Ctrl-C in the waiting thread cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def call_async(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Like `call`, awaited from any other loop."""
        return await asyncio.wrap_future(self.submit(coroutine))

    def stop(self, last: Coroutine[Any, Any, None]) -> None:
        """Run `last`, let pending work finish, end the thread.

        A call from this thread, when an engine is collected, only schedules these steps.
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
