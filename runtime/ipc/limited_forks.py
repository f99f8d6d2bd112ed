"""Runs work on untrusted input, each piece in a separate fork, under limits, killed when slow.

Input that crashes, hangs or fills memory ends only its fork. The fork starts with everything
loaded, so a small piece takes some ten milliseconds. For single-threaded processes.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq

_IDLE_WAIT_MS = 1000
_READ_BYTES = 1 << 20
# If a fork got less than this share of its time limit in processor time, its time-out does not
# count.
_LEAST_SHARE = 0.25
_LEAST_EXTENSION_S = 0.1


@dataclass(frozen=True)
class ForkLimits:
    """The resources that one fork may use.

    Attributes:
        timeout_s: seconds of wall time.
        cpu_s: seconds of processor time.
        memory_bytes: address space in addition to that of the forking process.
        patience_s: a fork that got less than a quarter of `timeout_s` in processor time may go on
            until it has had all of `timeout_s`, for up to this wall time; 0 for no extension.
    """

    timeout_s: float
    cpu_s: float
    memory_bytes: int
    patience_s: float = 0.0


@dataclass(frozen=True)
class ForkEnd:
    """The result of a fork.

    Attributes:
        answer: the result of the work; empty if the fork ended before.
        status: the exit status from `os.wait4`.
        timed_out: whether the fork was killed because its time was over.
        got_no_processor: whether the machine was too busy to give the fork its processor time.
    """

    answer: bytes
    status: int
    timed_out: bool
    got_no_processor: bool


class _Fork:
    def __init__(self, work: Callable[[], bytes], limits: ForkLimits) -> None:
        self.reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _work_and_exit(work, limits, writer)
        os.close(writer)
        self._limits = limits
        self._began = time.monotonic()
        # The processor time without which a time-out says nothing about the work.
        self._due_s = _LEAST_SHARE * limits.timeout_s
        self.deadline = self._began + limits.timeout_s
        self._parts: list[bytes] = []

    def read(self) -> bool:
        """Read available output; returns whether it is complete."""
        part = os.read(self.reader, _READ_BYTES)
        if part:
            self._parts.append(part)
        return not part

    def has_expired(self, now: float) -> bool:
        """Whether the time is over."""
        if now < self.deadline:
            return False
        last = self._began + self._limits.patience_s
        had_s = _processor_time(self.pid) if now < last else math.inf
        if had_s >= self._due_s:
            return True
        self._due_s = self._limits.timeout_s
        self.deadline = min(now + max(self._due_s - had_s, _LEAST_EXTENSION_S), last)
        return False

    def end(self, *, timed_out: bool) -> ForkEnd:
        """Reap the process and return the result."""
        # After its answer, the fork must not keep this process waiting.
        os.kill(self.pid, signal.SIGKILL)
        os.close(self.reader)
        _, status, usage = os.wait4(self.pid, 0)
        is_short = usage.ru_utime + usage.ru_stime < self._due_s
        answer = b"" if timed_out else b"".join(self._parts)
        return ForkEnd(answer, status, timed_out, timed_out and is_short)


class LimitedForks:
    """Runs pieces of work in forks, a limited number at a time, in order of arrival."""

    def __init__(self, poller: zmq.Poller, max_parallel: int) -> None:
        """Use `poller`, with which the process's own sockets are already registered."""
        self._poller = poller
        self._max_parallel = max_parallel
        self._waiting: deque[tuple[Callable[[], bytes], ForkLimits, Callable[[ForkEnd], None]]] = (
            deque()
        )
        self._running: dict[int, tuple[_Fork, Callable[[ForkEnd], None]]] = {}

    def add(
        self, work: Callable[[], bytes], limits: ForkLimits, done: Callable[[ForkEnd], None]
    ) -> None:
        """Run `work` in a fork as soon as a place is free, then call `done` in this process."""
        self._waiting.append((work, limits, done))
        self._start()

    def turn(self) -> None:
        """Wait for an event of a fork or of one of the process's own sockets, and handle it."""
        now = time.monotonic()
        first = min((fork.deadline for fork, _ in self._running.values()), default=None)
        wait_ms = _IDLE_WAIT_MS if first is None else max(0, int((first - now) * 1000) + 1)
        ready = {place for place, _ in self._poller.poll(wait_ms) if isinstance(place, int)}
        now = time.monotonic()
        for fork, done in list(self._running.values()):
            ended = fork.reader in ready and fork.read()
            timed_out = not ended and fork.has_expired(now)
            if ended or timed_out:
                self._poller.unregister(fork.reader)
                del self._running[fork.reader]
                done(fork.end(timed_out=timed_out))
        self._start()

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._max_parallel:
            work, limits, done = self._waiting.popleft()
            fork = _Fork(work, limits)
            self._running[fork.reader] = fork, done
            self._poller.register(fork.reader, zmq.POLLIN)


def _processor_time(pid: int) -> float:
    """Return the processor time that a process has had, in seconds."""
    # The name in brackets may hold blanks. User and system time are the 14th and 15th fields.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _work_and_exit(work: Callable[[], bytes], limits: ForkLimits, writer: int) -> None:
    """In the fork: work, answer, and exit without cleaning up the parent's objects."""
    try:
        _limit_resources(limits)
        answer = work()
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(answer)
    finally:
        os._exit(0)


def _limit_resources(limits: ForkLimits) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # If the parent is killed, only this limit ends the fork.
    seconds = int(limits.cpu_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
