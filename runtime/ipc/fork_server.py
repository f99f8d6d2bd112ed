"""A process for work on untrusted input, which runs each job in a separate fork with limits.

For each job, the front process creates a socket pair and passes one end to this process. It writes
the job to the other end and reads the answer from there. The process starts with the first job, and
is restarted if it has died. It ends when the front process closes the socket that is its standard
input.
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
from runtime.ipc.spawn import child_environment

logger = logging.getLogger(__name__)

# The process has a low priority, so that running requests are not delayed.
_NICENESS = 10
# Seconds for the front process to read an answer, after which it counts as gone.
_REPLY_TIMEOUT_S = 5.0
_READ_BYTES = 1 << 20
_ANSWER_TIMEOUT_S = 100.0
_MAX_ATTEMPTS = 2


# ---- the front's side ----


class ForkServer:
    """Runs jobs in a separate process, which it starts and restarts; usable from any thread."""

    def __init__(self, module: str, doing: str, environment: Mapping[str, str] = {}) -> None:
        """Store the parameters; the process starts with the first job.

        Args:
            module: the module that the process runs, as `python -m` does; it calls `serve`.
            doing: what the process does, for messages, such as "rendering chat templates".
            environment: additional environment variables of the process.
        """
        self._module = module
        self._doing = doing
        self._environment = environment
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Id of the process; `None` before its first start."""
        return None if self._process is None else self._process.pid

    def ask(self, *parts: bytes | memoryview) -> bytes:
        """Run a job and return its answer; blocks meanwhile.

        Args:
            parts: the parts of the job, which are sent one after the other, so that large parts
                need not be copied.

        Raises:
            EngineDead: the process died, and so did its replacement.
            Overloaded: the job was not done in time, because the machine is too busy.
        """
        for _ in range(_MAX_ATTEMPTS):
            with contextlib.suppress(ConnectionError):
                if answer := self._exchange(parts):
                    return answer
        raise EngineDead(f"The process for {self._doing} died; please try again.")

    def stop(self) -> None:
        """End the process, if it runs; a later job starts another one."""
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
            # If the process has not ended yet, it ends now, because its socket is closed.
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
    """Run jobs until the front process has closed the socket; called in the fork server's process.

    Args:
        work: called in a fork; returns the answer to a job.
        answer: called in this process when a fork has ended; returns the reply to the front
            process.
        limits: the limits of each fork.
        max_parallel: most forks at a time.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    control = socket.socket(fileno=0)
    poller = zmq.Poller()
    poller.register(control.fileno(), zmq.POLLIN)
    forks = LimitedForks(poller, max_parallel)
    # Forks share this memory as long as it is not written, so the garbage collector must not visit
    # these objects.
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
    """Read a job and return its answer, in a fork; empty if the job takes too much memory."""
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
            # Later forks also have this socket, so closing it here would not be visible in the
            # front process.
            connection.shutdown(socket.SHUT_RDWR)
