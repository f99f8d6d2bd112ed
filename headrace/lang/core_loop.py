"""The event loop that executes all programs of a process, and threads for the programs' functions.

The loop runs on its own thread, so callers may use any event loop, or none. A program's function
(its body), if it is a plain function, runs in its caller's thread. If the caller does not wait for
it, it runs in a thread of this module.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from headrace.engine.loop_thread import LoopThread

T = TypeVar("T")

_IDLE_THREAD_S = 5.0


class Threads:
    """Daemon threads for code that may block.

    A thread is started when none is idle, and ends when it has been idle for some time. The number
    of threads has no limit: if it had one, work that waits for other, queued work might never end.
    Callers must limit the work instead.
    """

    def __init__(self, name: str) -> None:
        """Store the threads' name; the first thread is started with the first work."""
        self._name = name
        self._work: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._num_idle = 0

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread without waiting for it; `work` must not raise."""
        with self._changed:
            self._work.append(work)
            if self._num_idle >= len(self._work):
                self._changed.notify()
                return
        threading.Thread(target=self._run, name=self._name, daemon=True).start()

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread and return its result."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def tell(result: Any, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)

        def run() -> None:
            result: Any = None
            error: BaseException | None = None
            try:
                result = work()
            except StopIteration as raised:
                # An asyncio future does not accept `StopIteration` as its exception.
                error = RuntimeError(f"{raised!r} came out of a back end")
            except BaseException as raised:
                error = raised
            loop.call_soon_threadsafe(tell, result, error)

        self.start(run)
        return await done

    def _run(self) -> None:
        while True:
            with self._changed:
                self._num_idle += 1
                has_work = self._changed.wait_for(lambda: bool(self._work), _IDLE_THREAD_S)
                self._num_idle -= 1
                if not has_work:
                    return
                work = self._work.popleft()
            work()
            # The reference is deleted, so that its objects are released while the thread is idle.
            del work


class Core:
    """The process's event loop for programs, and the threads for code that may block."""

    def __init__(self) -> None:
        """Start the thread of the event loop."""
        self.threads = Threads("headrace-body")
        self._loop = LoopThread("headrace-lang")
        self._starts: deque[Callable[[], object]] = deque()
        self._will_start = False

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on the loop's thread, where waiting would stop all programs."""
        return self._loop.is_current

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Schedule a call of `callback` on the loop's thread; callable from any thread."""
        self._loop.call_soon(callback, *args)

    def start_soon(self, start: Callable[[], object]) -> None:
        """Schedule a call of `start` on the loop's thread.

        It does the same as `call_soon`, but many calls wake the loop only once.
        """
        self._starts.append(start)
        if not self._will_start:
            self._will_start = True
            self._loop.call_soon(self._start_all)

    def _start_all(self) -> None:
        # The flag is cleared first. So a call that is added now is either run below, or wakes the
        # loop again.
        self._will_start = False
        while self._starts:
            self._starts.popleft()()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Any:
        """Schedule `coroutine` on the loop, and return a `concurrent.futures.Future` for it."""
        return self._loop.submit(coroutine)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the loop and return its result; Ctrl-C while waiting cancels it.

        Raises:
            RuntimeError: the caller runs on the loop's own thread, which would wait for itself.
        """
        self.refuse_to_block(coroutine)
        return self._loop.call(coroutine)

    async def call_async(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the loop, and await its result in any other event loop."""
        if self.is_current:
            return await coroutine
        return await self._loop.call_async(coroutine)

    def refuse_to_block(self, coroutine: Coroutine[Any, Any, Any] | None = None) -> None:
        """Raise an error if waiting in this thread would deadlock.

        Raises:
            RuntimeError: the caller runs on the loop's own thread.
        """
        if self.is_current:
            if coroutine is not None:
                coroutine.close()
            raise RuntimeError(
                "This would block the loop that it waits for: in an `async def` program use the "
                "awaitable form."
            )


_core: Core | None = None
_lock = threading.Lock()


def core() -> Core:
    """Return the process's `Core`; the first call in a process, also in a fork, creates it."""
    global _core  # noqa: PLW0603 one loop a process is the point
    if _core is not None:
        return _core
    with _lock:
        if _core is None:
            _core = Core()
        return _core


def _forget() -> None:
    """Drop the loop in a forked process: its thread does not exist, and its lock may be held."""
    global _core, _lock
    _core, _lock = None, threading.Lock()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget)
