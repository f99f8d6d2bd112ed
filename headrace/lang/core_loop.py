"""The event loop that executes all programs of a process, and threads for the programs' bodies.

The loop has its own thread, so callers may have any loop, or none. A body that is a plain function
runs in its caller's thread, or in a thread from here if the caller does not wait for it.
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
    """Daemon threads for code that may block: started when none is idle, ended when idle.

    There is no limit here; the caller bounds the work. With a limit, work that waits for other work
    in the same queue would never end.
    """

    def __init__(self, name: str) -> None:
        """Start no thread yet."""
        self._name = name
        self._work: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._num_idle = 0

    def start(self, work: Callable[[], None]) -> None:
        """Run `work`, which must not raise, in a thread."""
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
                # A future does not accept `StopIteration` as an exception.
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
            # Release the objects that the work refers to, before waiting for more.
            del work


class Core:
    """The loop, and the threads for code that may block."""

    def __init__(self) -> None:
        """Start the loop's thread."""
        self.threads = Threads("headrace-body")
        self._loop = LoopThread("headrace-lang")
        self._starts: deque[Callable[[], object]] = deque()
        self._will_start = False

    @property
    def is_current(self) -> bool:
        """Whether the caller is on the loop's thread, where waiting would stop all programs."""
        return self._loop.is_current

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Call `callback` on the loop's thread, from any thread."""
        self._loop.call_soon(callback, *args)

    def start_soon(self, start: Callable[[], object]) -> None:
        """Schedule a call like `call_soon`; calls made while the loop is busy share one wake-up."""
        self._starts.append(start)
        if not self._will_start:
            self._will_start = True
            self._loop.call_soon(self._start_all)

    def _start_all(self) -> None:
        # Clear the flag first, so that a later append is either seen below or wakes the loop again.
        self._will_start = False
        while self._starts:
            self._starts.popleft()()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Any:
        """Run `coroutine` on the loop; returns a concurrent future of its result."""
        return self._loop.submit(coroutine)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the loop and wait for it; Ctrl-C cancels it.

        Raises:
            RuntimeError: called on the loop's own thread, which would wait for itself.
        """
        self.refuse_to_block(coroutine)
        return self._loop.call(coroutine)

    async def call_async(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the loop and await it from any loop."""
        if self.is_current:
            return await coroutine
        return await self._loop.call_async(coroutine)

    def refuse_to_block(self, coroutine: Coroutine[Any, Any, Any] | None = None) -> None:
        """Raise if waiting here would deadlock.

        Raises:
            RuntimeError: on the loop's own thread.
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
    """The process's core; created at the first call, and again in a forked process."""
    global _core  # noqa: PLW0603 one loop a process is the point
    if _core is not None:
        return _core
    with _lock:
        if _core is None:
            _core = Core()
        return _core


def _forget() -> None:
    """After a fork, forget the loop: its thread does not exist here, and its lock may stay held."""
    global _core, _lock
    _core, _lock = None, threading.Lock()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget)
