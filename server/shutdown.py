"""Leaving in order: no new requests, running ones finish, a second signal ends the patience."""

from __future__ import annotations

import asyncio
import logging
import signal
import time

from runtime.client.client import EngineClient
from server.context import Lifecycle

logger = logging.getLogger(__name__)

# After an abort each request still gets its last event; this is more than one step takes.
_ABORT_GRACE_S = 2.0
_POLL_S = 0.05
_REPORT_EVERY_S = 5.0


class Shutdown:
    """Turns signals into an orderly end.

    Attributes:
        requested: set by the first signal.
        hurried: set by the second.
    """

    def __init__(self, lifecycle: Lifecycle, client: EngineClient, drain_timeout_s: float) -> None:
        """Give running requests up to `drain_timeout_s` seconds once a signal came."""
        self.requested = asyncio.Event()
        self.hurried = asyncio.Event()
        self._lifecycle = lifecycle
        self._client = client
        self._drain_timeout_s = drain_timeout_s

    def install(self) -> None:
        """Listen to SIGTERM and to Ctrl-C."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.on_signal, number)

    def on_signal(self, number: int) -> None:
        """The first signal drains, the second stops now."""
        name = signal.Signals(number).name
        if self.requested.is_set():
            logger.warning("%s again: stopping now.", name)
            self.hurried.set()
            return
        count = self._client.num_in_flight
        if count:
            logger.info(
                "%s: running requests (%d) may finish within %.0f s; once more stops now.",
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
        """Wait for running requests, then abort what is left."""
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
        self._client.abort_all("The server is shutting down and the drain time is over.")
        deadline = time.monotonic() + _ABORT_GRACE_S
        while self._client.num_in_flight and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        self._client.fail_all("The server is shutting down.")
