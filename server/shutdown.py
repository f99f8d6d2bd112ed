"""Orderly shutdown: no new requests, running ones finish, a second signal stops immediately.

The process always ends, even with a hanging thread or a blocked event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

from runtime.client.client import EngineClient
from runtime.ipc.standard_error import drain_standard_error
from runtime.service.context import Lifecycle

logger = logging.getLogger(__name__)

# After an abort each request still gets its last event. This time is longer than one step.
_ABORT_GRACE_S = 2.0
# The time limit of the shutdown after draining, or of the whole shutdown after a second signal.
_PATIENCE_S = 30.0
HURRIED_PATIENCE_S = 8.0
_DUMP_S = 0.5
_POLL_S = 0.05
_REPORT_EVERY_S = 5.0


class Shutdown:
    """Turns signals into an orderly shutdown.

    Attributes:
        requested: set by the first signal.
        hurried: set by the second.
    """

    def __init__(self, lifecycle: Lifecycle, client: EngineClient, drain_timeout_s: float) -> None:
        """Give running requests up to `drain_timeout_s` seconds after a signal."""
        self.requested = asyncio.Event()
        self.hurried = asyncio.Event()
        self._lifecycle = lifecycle
        self._client = client
        self._drain_timeout_s = drain_timeout_s

    def install(self) -> None:
        """Handle SIGTERM and Ctrl-C, on the main thread.

        The loop's own signal handlers are not used: they need a running loop, and the deadline must
        be set even if the loop is blocked.
        """
        loop = asyncio.get_running_loop()
        num_signals = 0

        def handle(number: int, _: FrameType | None) -> None:
            nonlocal num_signals
            num_signals += 1
            patience_s = HURRIED_PATIENCE_S
            if num_signals == 1:
                patience_s = self._drain_timeout_s + _ABORT_GRACE_S + _PATIENCE_S
            _leave_by_force(patience_s)
            with contextlib.suppress(RuntimeError):  # the loop is already closed
                loop.call_soon_threadsafe(self.on_signal, number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handle)

    def on_signal(self, number: int) -> None:
        """Drain on the first signal, stop immediately on the second."""
        name = signal.Signals(number).name
        if self.requested.is_set():
            logger.warning("%s again: stopping now.", name)
            self.hurried.set()
            return
        count = self._client.num_in_flight
        if count:
            logger.info(
                "%s: running requests (%d) may finish within %.0f s; a second signal stops now.",
                name,
                count,
                self._drain_timeout_s,
            )
        else:
            logger.info("%s: stopping.", name)
        self._lifecycle.draining = True
        self._client.accepting = False
        self.requested.set()

    async def drain(self) -> None:
        """Wait for running requests, then abort the rest."""
        started_at = reported_at = time.monotonic()
        while self._client.num_in_flight and not self.hurried.is_set():
            now = time.monotonic()
            if now - started_at > self._drain_timeout_s:
                logger.warning("Requests aborted: %d.", self._client.num_in_flight)
                break
            if now - reported_at > _REPORT_EVERY_S:
                reported_at = now
                logger.info("Requests still running: %d.", self._client.num_in_flight)
            await asyncio.sleep(_POLL_S)
        if self.hurried.is_set():
            return
        self._client.abort_all("The server is shutting down, and the drain time has passed.")
        deadline = time.monotonic() + _ABORT_GRACE_S
        while self._client.num_in_flight and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        self._client.fail_all("The server is shutting down.")


def leave(status: int) -> NoReturn:
    """End the process after clean-up, whatever its threads are doing."""
    # Flushing fails, for example, if the stream is closed or full.
    for flush in (logging.shutdown, sys.stdout.flush, drain_standard_error):
        with contextlib.suppress(Exception):
            flush()
    os._exit(status)


def _leave_by_force(after_s: float) -> None:
    """Force the process to exit if it is still running after `after_s`.

    The children end with it, as with any death of the front; the next server removes its folder.
    """

    def wait() -> None:
        time.sleep(after_s)
        # Dump the stacks, on a separate thread because writing may block.
        threading.Thread(target=_dump_stacks, daemon=True).start()
        time.sleep(_DUMP_S)
        os._exit(1)

    threading.Thread(target=wait, name="leave-by-force", daemon=True).start()


def _dump_stacks() -> None:
    os.write(2, b"headrace: the shutdown takes too long; exiting now. Stacks of all threads:\n")
    faulthandler.dump_traceback(2)
