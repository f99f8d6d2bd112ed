"""Runs work on untrusted input in forks: one fork for each piece, with limits on time and memory.

Input that crashes, hangs or fills the memory ends only its fork. A fork starts with all modules
loaded, so a small piece takes about ten milliseconds. The process must be single-threaded.
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
# A time-out of a fork that has had less than this share of its time limit as CPU time does not
# count: the machine was too busy.
_LEAST_SHARE = 0.25
_LEAST_EXTENSION_S = 0.1


@dataclass(frozen=True)
class ForkLimits:
    """Limits on the resources of a fork.

    Attributes:
        timeout_s: most wall time, seconds.
        cpu_s: most CPU time, seconds.
        memory_bytes: address space that the fork may use in addition to that of its parent.
        patience_s: the wall time, in seconds, that replaces `timeout_s` on a busy machine; 0 for
            none. The machine counts as busy if the fork got less than a quarter of `timeout_s` as
            CPU time. The fork ends earlier if its CPU time reaches `timeout_s`.
    """

    timeout_s: float
    cpu_s: float
    memory_bytes: int
    patience_s: float = 0.0


@dataclass(frozen=True)
class ForkEnd:
    """How a fork ended.

    Attributes:
        answer: the result of the work; empty if the fork ended before it had one.
        status: the exit status from `os.wait4`.
        timed_out: whether the fork was killed because its time was over.
        got_no_processor: whether it timed out because the machine was too busy to run it.
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
        # With less CPU time than this, a time-out does not show that the work is slow.
        self._due_s = _LEAST_SHARE * limits.timeout_s
        self.deadline = self._began + limits.timeout_s
        self._parts: list[bytes] = []

    def read(self) -> bool:
        """Read the available output; return whether the output is complete."""
        part = os.read(self.reader, _READ_BYTES)
        if part:
            self._parts.append(part)
        return not part

    def has_expired(self, now: float) -> bool:
        """Whether the fork's time is over, after any extension."""
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
        """Kill the process if it still runs, and return how it ended."""
        # A fork that has answered but does not exit must not delay this process.
        os.kill(self.pid, signal.SIGKILL)
        os.close(self.reader)
        _, status, usage = os.wait4(self.pid, 0)
        is_short = usage.ru_utime + usage.ru_stime < self._due_s
        answer = b"" if timed_out else b"".join(self._parts)
        return ForkEnd(answer, status, timed_out, timed_out and is_short)


class LimitedForks:
    """Runs pieces of work in forks, in the order of their arrival, a limited number at a time."""

    def __init__(self, poller: zmq.Poller, max_parallel: int) -> None:
        """Start without forks.

        Args:
            poller: waits for the sockets of this process, which are registered already, and for
                the forks.
            max_parallel: most forks at a time.
        """
        self._poller = poller
        self._max_parallel = max_parallel
        self._waiting: deque[tuple[Callable[[], bytes], ForkLimits, Callable[[ForkEnd], None]]] = (
            deque()
        )
        self._running: dict[int, tuple[_Fork, Callable[[ForkEnd], None]]] = {}

    def add(
        self, work: Callable[[], bytes], limits: ForkLimits, done: Callable[[ForkEnd], None]
    ) -> None:
        """Run `work` in a fork as soon as possible, then call `done` in this process."""
        self._waiting.append((work, limits, done))
        self._start()

    def turn(self) -> None:
        """Wait for a fork or for one of the process's own sockets, and handle forks that ended."""
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
    """Return the CPU time that a process has used, in seconds."""
    # The program's name, in brackets, may contain blanks. User and system time are fields 14 and
    # 15.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _work_and_exit(work: Callable[[], bytes], limits: ForkLimits, writer: int) -> None:
    """Run the work in a fork, write the answer, and exit without cleaning up the parent's data."""
    try:
        _limit_resources(limits)
        answer = work()
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(answer)
    finally:
        os._exit(0)


def _limit_resources(limits: ForkLimits) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # If the parent is killed, nothing but this limit ends the fork.
    seconds = int(limits.cpu_s) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + limits.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
