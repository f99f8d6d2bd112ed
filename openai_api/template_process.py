"""A process that renders chat templates which are not known to be harmless, each in its own fork.

The front hands over one end of a pair of sockets for each render, writes the job there and reads
the answer. The process ends when its standard input, the other end of the front's socket, does.
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
from functools import partial
from typing import Any

import msgspec
import zmq

from openai_api.template_render import RENDER_TIMEOUT_S, CompiledTemplate
from runtime.errors import EngineDead, HeadraceError, InvalidRequest, Overloaded, TooLong
from runtime.ipc.limited_forks import ForkEnd, ForkLimits, LimitedForks
from runtime.ipc.process import child_environment

logger = logging.getLogger(__name__)

# By the clock a render may take longer than by its processor time: the machine may be busy.
LIMITS = ForkLimits(timeout_s=20.0, cpu_s=RENDER_TIMEOUT_S, memory_bytes=2**29)
MAX_PARALLEL = 2
# Streams come first.
_NICENESS = 10
# Of a front that has left meanwhile.
_REPLY_TIMEOUT_S = 5.0
_READ_BYTES = 1 << 20
_ANSWER_TIMEOUT_S = 100.0
_MAX_ATTEMPTS = 2


class Job(msgspec.Struct):
    """A template's text and what to render it with; without `values` it is only compiled."""

    source: str
    name: str
    values: dict[str, Any] | None = None
    max_chars: int = 0


class Rendered(msgspec.Struct, omit_defaults=True):
    """What came of a job.

    Attributes:
        text: the prompt; `None` where the template tripped over a value.
        error: why there is none.
        error_kind: `refused`, `too_long`, `busy`, or `startup` where the text is no template.
        variables: names that the text reads from outside.
        compiled: the job, where it was only compiled and could be.
    """

    text: str | None = None
    error: str = ""
    error_kind: str = ""
    variables: list[str] = []
    compiled: Job | None = None


_KINDS: dict[str, type[HeadraceError]] = {
    "refused": InvalidRequest,
    "too_long": TooLong,
    "busy": Overloaded,
}
_encode = msgspec.msgpack.Encoder().encode
_job = msgspec.msgpack.Decoder(Job)
_rendered = msgspec.msgpack.Decoder(Rendered)


# ---- the front's side ----


class TemplateProcess:
    """Starts the process with the first job, and again when it has died; for any thread."""

    def __init__(self) -> None:
        """Prepare; nothing starts yet."""
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id, once it was started."""
        return None if self._process is None else self._process.pid

    def ask(self, job: Job) -> Rendered:
        """Have one job done; blocks.

        Raises:
            EngineDead: the process died, and so did the one after it.
            InvalidRequest: the values are not such as JSON has.
            Overloaded: the machine is too busy.
        """
        try:
            payload = _encode(job)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidRequest(
                f"The chat template cannot be given these messages: {error}.", param="messages"
            ) from None
        for _ in range(_MAX_ATTEMPTS):
            with contextlib.suppress(ConnectionError):
                if answer := self._exchange(payload):
                    return _rendered.decode(answer)
        raise EngineDead("The process that renders chat templates died; please try again.")

    def _exchange(self, payload: bytes) -> bytes:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._hand_over(theirs)
            theirs.close()
            deadline = time.monotonic() + _ANSWER_TIMEOUT_S
            ours.settimeout(_ANSWER_TIMEOUT_S)
            parts = []
            try:
                ours.sendall(payload)
                ours.shutdown(socket.SHUT_WR)
                while part := ours.recv(_READ_BYTES):
                    parts.append(part)
                    ours.settimeout(max(deadline - time.monotonic(), 0.001))
            except TimeoutError:
                raise Overloaded("The server is busy rendering chat templates.") from None
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
            logger.error("The process that renders chat templates died; starting it again.")
            # Without its socket it leaves, if it has not ended.
            self._process.wait()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "openai_api.template_process"],
                stdin=theirs.fileno(),
                env=child_environment(),
                start_new_session=True,
            )
        return ours


def raise_error(rendered: Rendered) -> None:
    """Raise what a render failed with, if it did."""
    if rendered.error_kind:
        raise _KINDS[rendered.error_kind](rendered.error, param="messages")


# ---- the process's side ----

_Templates = dict[str, CompiledTemplate]


def _work(templates: _Templates, connection: socket.socket) -> bytes:
    """In a fork: read a job, do it, and give the answer."""
    parts = []
    while part := connection.recv(_READ_BYTES):
        parts.append(part)
    job = _job.decode(b"".join(parts))
    parts.clear()
    try:
        return _encode(_render(templates, job))
    except MemoryError:
        return b""


def _render(templates: _Templates, job: Job) -> Rendered:
    try:
        template = templates.get(job.source) or CompiledTemplate(job.source, job.name)
        if job.values is None:
            return Rendered(variables=sorted(template.variables), compiled=job)
        return Rendered(template.render(job.values, job.max_chars))
    except TooLong as error:
        return Rendered(error=error.message, error_kind="too_long")
    except InvalidRequest as error:
        return Rendered(error=error.message, error_kind="refused")
    except HeadraceError as error:
        return Rendered(error=error.message, error_kind="startup")


def _answer(templates: _Templates, connection: socket.socket, end: ForkEnd) -> None:
    answer = end.answer
    if end.got_no_processor:
        error = "The machine was too busy to render the chat template; please try again."
        answer = _encode(Rendered(error=error, error_kind="busy"))
    elif not answer:
        error = (
            f"Chat template error: it needs more than {LIMITS.cpu_s:g} s or "
            f"{LIMITS.memory_bytes >> 20} MiB for these messages"
        )
        answer = _encode(Rendered(error=error, error_kind="refused"))
    with connection, contextlib.suppress(OSError):
        connection.settimeout(_REPLY_TIMEOUT_S)
        try:
            connection.sendall(answer)
        finally:
            # Forks that were made meanwhile hold it too: closing it here tells the front nothing.
            connection.shutdown(socket.SHUT_RDWR)
    if (job := _rendered.decode(answer).compiled) is not None:
        # A fork could compile it within its limits, so this process can. Later ones have it.
        templates[job.source] = CompiledTemplate(job.source, job.name)


def main() -> None:
    """Render until the front has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    control = socket.socket(fileno=0)
    poller = zmq.Poller()
    poller.register(control.fileno(), zmq.POLLIN)
    forks = LimitedForks(poller, MAX_PARALLEL)
    templates: _Templates = {}
    # Forks share what is here: the collector must not touch it.
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
        forks.add(
            partial(_work, templates, connection), LIMITS, partial(_answer, templates, connection)
        )


if __name__ == "__main__":
    main()
