"""A process for untrusted work: each job runs in a separate fork, under limits.

For each job the front passes one end of a socket pair to the process, writes the job to its own end
and reads the answer from it. The process starts with the first job and is restarted when it has
died. It ends when its standard input, a socket whose other end the front holds, is closed.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import zmq

from runtime.errors import EngineDead, Overloaded
from runtime.ipc.limited_forks import ForkEnd, ForkLimits, LimitedForks
from runtime.ipc.process import child_environment

logger = logging.getLogger(__name__)

# Running streams have priority.
_NICENESS = 10
# This ignores a front that has left meanwhile.
_REPLY_TIMEOUT_S = 5.0
_READ_BYTES = 1 << 20
_ANSWER_TIMEOUT_S = 100.0
_MAX_ATTEMPTS = 2


# ---- the front's side ----


class ForkServer:
    """Runs jobs in a process that runs one of our modules; safe to use from any thread."""

    def __init__(self, module: str, doing: str, environment: Mapping[str, str] = {}) -> None:
        """Prepare; nothing starts yet.

        Args:
            module: module that `python -m` runs; it calls `serve`.
            doing: the process's purpose, for messages: "rendering chat templates".
            environment: variables that the process gets besides ours.
        """
        self._module = module
        self._doing = doing
        self._environment = environment
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id; `None` before the first start."""
        return None if self._process is None else self._process.pid

    def ask(self, *parts: bytes | memoryview) -> bytes:
        """Run one job; blocks.

        Args:
            parts: the job's parts, which are sent one after the other, so that large parts need not
                be copied.

        Raises:
            EngineDead: the process died, and so did the one after it.
            Overloaded: the machine is too busy.
        """
        for _ in range(_MAX_ATTEMPTS):
            with contextlib.suppress(ConnectionError):
                if answer := self._exchange(parts):
                    return answer
        raise EngineDead(f"The process for {self._doing} died; please try again.")

    def stop(self) -> None:
        """End the process if it runs; a later job starts another one."""
        with self._lock:
            if self._control is not None:
                self._control.close()
                self._control = None
            if self._process is not None:
                self._process.wait()
                self._process = None

    def _exchange(self, job: Sequence[bytes | memoryview]) -> bytes:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._hand_over(theirs)
            theirs.close()
            deadline = time.monotonic() + _ANSWER_TIMEOUT_S
            ours.settimeout(_ANSWER_TIMEOUT_S)
            parts = []
            try:
                for piece in job:
                    ours.sendall(piece)
                ours.shutdown(socket.SHUT_WR)
                while part := ours.recv(_READ_BYTES):
                    parts.append(part)
                    ours.settimeout(max(deadline - time.monotonic(), 0.001))
            except TimeoutError:
                raise Overloaded(f"The server is busy {self._doing}.") from None
            return b"".join(parts)

    def _hand_over(self, theirs: socket.socket) -> None:
        with self._lock:
            if self._control is not None:
                try:
                    socket.send_fds(self._control, [b"."], [theirs.fileno()])
                    return
                except OSError:
                    self._control.close()
            self._control = self._start()
            socket.send_fds(self._control, [b"."], [theirs.fileno()])

    def _start(self) -> socket.socket:
        if self._process is not None:
            logger.error("The process for %s died; starting it again.", self._doing)
            # If it has not ended yet, it does so now: its socket is closed.
            self._process.wait()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module],
                stdin=theirs.fileno(),
                env=child_environment(self._environment),
                start_new_session=True,
            )
        return ours


# ---- the process's side ----


def serve(
    work: Callable[[bytes], bytes],
    answer: Callable[[ForkEnd], bytes],
    limits: ForkLimits,
    max_parallel: int,
) -> None:
    """Run jobs until the front has gone.

    Args:
        work: called in a fork; makes the answer to a job.
        answer: called in this process; makes the reply to the front from a fork that has ended.
        limits: the limits of each fork.
        max_parallel: most forks at a time.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    control = socket.socket(fileno=0)
    poller = zmq.Poller()
    poller.register(control.fileno(), zmq.POLLIN)
    forks = LimitedForks(poller, max_parallel)
    # Forks share this memory: the garbage collector must not write to it.
    gc.collect()
    gc.freeze()
    while True:
        forks.turn()
        control.setblocking(False)
        try:
            message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        except BlockingIOError:
            continue
        if not message:
            os._exit(0)
        connection = socket.socket(fileno=descriptors[0])
        connection.setblocking(True)
        forks.add(partial(_work, work, connection), limits, partial(_reply, answer, connection))


def _work(work: Callable[[bytes], bytes], connection: socket.socket) -> bytes:
    """In a fork: read a job and run it; the answer is empty if it takes too much memory."""
    try:
        parts = []
        while part := connection.recv(_READ_BYTES):
            parts.append(part)
        job = b"".join(parts)
        parts.clear()
        return work(job)
    except MemoryError:
        return b""


def _reply(answer: Callable[[ForkEnd], bytes], connection: socket.socket, end: ForkEnd) -> None:
    content = answer(end)
    with connection, contextlib.suppress(OSError):
        connection.settimeout(_REPLY_TIMEOUT_S)
        try:
            connection.sendall(content)
        finally:
            # Later forks hold this socket, too, so closing it here would not signal the end.
            connection.shutdown(socket.SHUT_RDWR)
