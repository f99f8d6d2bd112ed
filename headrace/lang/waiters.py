"""Waiting for a condition from any thread and from any event loop, without polling."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable

from headrace.lang.core_loop import core

# The longest time until Ctrl-C is noticed. A signal may arrive after Python has checked for one and
# before the thread sleeps; it is then seen only when the thread wakes.
_SIGNALS_S = 0.5


class _Waiter:
    __slots__ = ("is_met", "wake")

    def __init__(self, is_met: Callable[[], bool], wake: Callable[[], None]) -> None:
        self.is_met = is_met
        self.wake = wake


class Waiters:
    """The waiting callers and their conditions. Code that changes the state calls `notify`.

    Attributes:
        lock: held while anything changes, and while a condition is evaluated.
    """

    __slots__ = ("_waiters", "lock")

    def __init__(self) -> None:
        """Start without waiters."""
        self.lock = threading.RLock()
        self._waiters: list[_Waiter] = []

    def notify(self) -> None:
        """Wake the waiters whose condition holds; the caller holds the lock."""
        if not self._waiters:
            return
        met = [waiter for waiter in self._waiters if waiter.is_met()]
        for waiter in met:
            self._waiters.remove(waiter)
            waiter.wake()

    def call_when(self, is_met: Callable[[], bool], callback: Callable[[], None]) -> None:
        """Call `callback` once `is_met` holds; it runs under the lock, in the notifying thread."""
        with self.lock:
            if is_met():
                callback()
            else:
                self._waiters.append(_Waiter(is_met, callback))

    def wait(self, is_met: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Block until `is_met`, which is called under the lock.

        Raises:
            RuntimeError: called on the core's own thread.
            TimeoutError: the condition did not hold in time.
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
        """Called by a thread before it blocks."""

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
                # The loop may have been closed while a coroutine waits in it.
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
    """Wait for `gate`, checking for signals at intervals in the thread that handles them."""
    if threading.current_thread() is not threading.main_thread():
        return gate.acquire(timeout=-1 if timeout_s is None else timeout_s)
    until = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while (left_s := until - time.monotonic()) > _SIGNALS_S:
        if gate.acquire(timeout=_SIGNALS_S):
            return True
    return gate.acquire(timeout=max(0.0, left_s))
