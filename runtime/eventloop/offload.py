"""Runs work that grows with a request off the event loop, on a thread pool for each purpose.

Each purpose has its own pool, so a backlog of one kind of work does not delay other kinds. The
threads are daemons, so the interpreter's exit does not wait for them; it would wait for those of
`asyncio.to_thread` and `concurrent.futures`.

A thread that holds the GIL stalls the loop. So the work must be done in a library that releases the
GIL, or be cut into slices.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from runtime.errors import InvalidRequest, Overloaded

P = ParamSpec("P")
T = TypeVar("T")


class OffloadPool:
    """A limited number of daemon threads for one purpose, with a limited queue.

    A running job cannot be stopped when its caller stops waiting for it, after a timeout or because
    the client has disconnected. While such a job runs on, an additional thread takes its place, so
    there are at most twice `workers` threads.
    """

    def __init__(self, name: str, *, workers: int, max_queued: int, timeout_s: float) -> None:
        """Prepare without threads; a thread starts when a job finds none idle.

        Args:
            name: what the work is, a noun for messages and thread names ("tokenization").
            workers: most jobs that are worked on at a time.
            max_queued: most jobs that wait for a thread.
            timeout_s: most seconds from `run` to its result.
        """
        self._name = name
        self._workers = workers
        self._max_queued = max_queued
        self._timeout_s = timeout_s
        self._queue: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._num_threads = 0
        self._num_idle = 0
        self._num_running = 0
        self._num_abandoned = 0

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` on a thread of this pool and return its result.

        Raises:
            Overloaded: the queue is full, or no thread was free in time.
            InvalidRequest: the work began but was not finished in time.
            Exception: whatever `function` raises.
        """
        job = _Job(lambda: function(*args, **kwargs))
        self._put(job)
        try:
            # `asyncio.timeout` is not used: its error could not be told apart from a TimeoutError
            # that `function` raises.
            await asyncio.wait((job.done,), timeout=self._timeout_s)
        finally:
            had_begun = self._leave(job)
        if job.done.done():
            return job.done.result()
        if had_begun:
            raise InvalidRequest(
                f"The {self._name} that this request needs took longer than {self._timeout_s:g} s."
            )
        raise Overloaded(f"The server is busy with the {self._name} of other requests.")

    def _put(self, job: _Job) -> None:
        with self._changed:
            # Jobs for which a thread is free do not count as waiting.
            num_free = max(0, self._workers - self._num_running)
            if len(self._queue) - num_free >= self._max_queued:
                raise Overloaded(
                    f"The server is busy with the {self._name} of other requests: "
                    f"{self._max_queued} are waiting for theirs."
                )
            self._queue.append(job)
            self._start_thread()
            self._changed.notify()

    def _start_thread(self) -> None:
        """Start a thread if jobs wait, no thread is idle and one more is allowed (lock held)."""
        most = self._workers + min(self._num_abandoned, self._workers)
        if len(self._queue) <= self._num_idle or self._num_threads >= most:
            return
        self._num_threads += 1
        # `threading.Thread` is not used: its `start` waits until the thread runs, and would block
        # the event loop while other threads have the GIL.
        _thread.start_new_thread(self._work, (f"{self._name}-{self._num_threads}",))

    def _leave(self, job: _Job) -> bool:
        """Record that the caller no longer waits; return whether work on its job had begun."""
        with self._changed:
            if job.state == "queued":
                self._queue.remove(job)
                return False
            if job.state == "running":
                job.state = "abandoned"
                self._num_abandoned += 1
                self._start_thread()
            return True

    def _work(self, name: str) -> None:
        threading.current_thread().name = name
        while True:
            with self._changed:
                if self._num_threads > self._workers + min(self._num_abandoned, self._workers):
                    # The abandoned job in whose place this thread was started has ended.
                    self._num_threads -= 1
                    return
                self._num_idle += 1
                while not self._queue:
                    self._changed.wait()
                self._num_idle -= 1
                job = self._queue.popleft()
                job.state = "running"
                self._num_running += 1
            result, error = job.work()
            with self._changed:
                self._num_running -= 1
                if job.state == "abandoned":
                    self._num_abandoned -= 1
                job.state = "over"
            job.tell(result, error)
            # The job's objects must not live until the next job comes.
            del job, result, error


class _Job:
    """One call of `OffloadPool.run`; `state` is `queued`, `running`, `abandoned` or `over`."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.state = "queued"
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Any] = self.loop.create_future()
        self._call = call

    def work(self) -> tuple[Any, BaseException | None]:
        """Run the call; return its result or the exception that it raised."""
        try:
            return self._call(), None
        except BaseException as error:
            return None, error

    def tell(self, result: Any, error: BaseException | None) -> None:
        """Pass result or exception to the waiting caller, from any thread."""
        # If the event loop is closed, no caller waits.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._settle, result, error)

    def _settle(self, result: Any, error: BaseException | None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(result)
        else:
            self.done.set_exception(error)
            # Retrieving the exception keeps asyncio from logging it if the caller has left.
            self.done.exception()
