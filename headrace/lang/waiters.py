"""Lets threads and coroutines of any event loop wait for a condition, without polling."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable

from headrace.lang.core_loop import core

# The longest time in seconds until Ctrl-C is noticed. If a signal arrives after Python has checked
# for signals and before the thread sleeps, it is noticed only when the thread wakes.
_SIGNALS_S = 0.5


class _Waiter:
    __slots__ = ("is_met", "wake")

    def __init__(self, is_met: Callable[[], bool], wake: Callable[[], None]) -> None:
        self.is_met = is_met
        self.wake = wake


class Waiters:
    """The callers that wait for conditions on a shared state.

    Code that changes the state holds the lock and then calls `notify`.

    Attributes:
        lock: held while the state changes, and while a condition is evaluated.
    """

    __slots__ = ("_waiters", "lock")

    def __init__(self) -> None:
        """Start without waiters."""
        self.lock = threading.RLock()
        self._waiters: list[_Waiter] = []

    def notify(self) -> None:
        """Wake the waiting callers whose condition holds now; the caller must hold the lock."""
        if not self._waiters:
            return
        met = [waiter for waiter in self._waiters if waiter.is_met()]
        for waiter in met:
            self._waiters.remove(waiter)
            waiter.wake()

    def call_when(self, is_met: Callable[[], bool], callback: Callable[[], None]) -> None:
        """Call `callback` as soon as `is_met` returns true.

        It is called with the lock held, in the thread that calls `notify`.
        """
        with self.lock:
            if is_met():
                callback()
            else:
                self._waiters.append(_Waiter(is_met, callback))

    def wait(self, is_met: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Block until `is_met`, which is called with the lock held, returns true.

        Raises:
            RuntimeError: the caller runs on the thread of the frontend's event loop.
            TimeoutError: the condition did not hold within `timeout_s` seconds.
        """
        with self.lock:
            if is_met():
                return
            core().refuse_to_block()
            gate = threading.Lock()
            gate.acquire()
            waiter = _Waiter(is_met, gate.release)
            self._waiters.append(waiter)
        try:
            self.about_to_block()
            if not _acquired(gate, timeout_s):
                raise TimeoutError(f"Not done after {timeout_s} s.")
        finally:
            self._forget(waiter)

    def about_to_block(self) -> None:
        """Do nothing; subclasses override this method, which a thread calls before it blocks."""

    async def wait_async(self, is_met: Callable[[], bool]) -> None:
        """Wait as `wait` does, as a coroutine of any event loop."""
        with self.lock:
            if is_met():
                return
            loop = asyncio.get_running_loop()
            done: asyncio.Future[None] = loop.create_future()

            def resolve() -> None:
                if not done.done():
                    done.set_result(None)

            def wake() -> None:
                # The event loop of a waiting coroutine may have been closed meanwhile.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(resolve)

            waiter = _Waiter(is_met, wake)
            self._waiters.append(waiter)
        try:
            await done
        finally:
            self._forget(waiter)

    def _forget(self, waiter: _Waiter) -> None:
        with self.lock, contextlib.suppress(ValueError):
            self._waiters.remove(waiter)


def _acquired(gate: threading.Lock, timeout_s: float | None) -> bool:
    """Acquire `gate` and return whether it was acquired in time.

    The thread that handles signals wakes at intervals, to check for signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return gate.acquire(timeout=-1 if timeout_s is None else timeout_s)
    until = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while (left_s := until - time.monotonic()) > _SIGNALS_S:
        if gate.acquire(timeout=_SIGNALS_S):
            return True
    return gate.acquire(timeout=max(0.0, left_s))
