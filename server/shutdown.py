"""Orderly shutdown: new requests are refused, running ones finish; a second signal stops at once.

The process always ends, even if a thread hangs or the event loop is blocked.
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

# Seconds that aborted requests get to send their last events; longer than one step.
_ABORT_GRACE_S = 2.0
# Seconds that the shutdown may take after draining; and as a whole after a second signal.
_PATIENCE_S = 30.0
HURRIED_PATIENCE_S = 8.0
_DUMP_S = 0.5
_POLL_S = 0.05
_REPORT_EVERY_S = 5.0


class Shutdown:
    """Turns signals into an orderly shutdown.

    Attributes:
        requested: set by the first signal.
        hurried: set by the second signal.
    """

    def __init__(self, lifecycle: Lifecycle, client: EngineClient, drain_timeout_s: float) -> None:
        """After the first signal, let requests run for up to `drain_timeout_s` seconds."""
        self.requested = asyncio.Event()
        self.hurried = asyncio.Event()
        self._lifecycle = lifecycle
        self._client = client
        self._drain_timeout_s = drain_timeout_s

    def install(self) -> None:
        """Handle SIGTERM and Ctrl-C; call this on the main thread.

        Python's own signal handlers are used, not the event loop's. The event loop's handlers run
        only if the loop is not blocked, but the deadline must be set even if it is.
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
            with contextlib.suppress(RuntimeError):  # Raised if the loop is closed already.
                loop.call_soon_threadsafe(self.on_signal, number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, handle)

    def on_signal(self, number: int) -> None:
        """Begin to drain on the first signal; stop at once on the second."""
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
        """Wait until the running requests have ended; after the drain time, abort the rest."""
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
    """Flush the output and end the process at once, whatever its threads are doing."""
    # Flushing may fail, for example because a stream is closed or its disk is full.
    for flush in (logging.shutdown, sys.stdout.flush, drain_standard_error):
        with contextlib.suppress(Exception):
            flush()
    os._exit(status)


def _leave_by_force(after_s: float) -> None:
    """End the process by force if it is still running after `after_s` seconds.

    Its children end too, as after any death of this process. The next server removes this process's
    folder.
    """

    def wait() -> None:
        time.sleep(after_s)
        # The stacks are written on another thread, because writing may block.
        threading.Thread(target=_dump_stacks, daemon=True).start()
        time.sleep(_DUMP_S)
        os._exit(1)

    threading.Thread(target=wait, name="leave-by-force", daemon=True).start()


def _dump_stacks() -> None:
    os.write(2, b"headrace: the shutdown takes too long; exiting now. Stacks of all threads:\n")
    faulthandler.dump_traceback(2)
