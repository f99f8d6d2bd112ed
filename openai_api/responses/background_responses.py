"""Runs responses in the background, independent of the client's connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from openai_api.responses.event_log import EventLogs
from runtime.service.generation import Chunk, Indexed, named_event

# Seconds to wait until the engine reports that it has stopped a response.
ABORT_TIMEOUT_S = 10.0


Event = dict[str, Any]


class RunningResponse(Protocol):
    """A response that runs in the background; `ResponseRun` implements this protocol."""

    id: str
    response: dict[str, Any]

    def chunks(self) -> AsyncGenerator[Indexed, None]:
        """Return the engine's chunks, which `streamed` takes."""

    def streamed(self, chunks: AsyncGenerator[Indexed, None]) -> AsyncGenerator[Event, None]:
        """Yield every event of the response in order; if it fails, the last event says so."""

    async def keep(self) -> None:
        """Store the current state of the response, if the request allows it."""

    def close(self) -> None:
        """Stop reading, and abort the engine's requests that still run."""

    def abort(self) -> None:
        """Abort the engine's request; the events continue up to the last one."""

    async def cancel(self) -> None:
        """End the response without waiting for the engine."""


class BackgroundResponses:
    """The background responses that run now. Each is also in the store, for later requests.

    Attributes:
        logs: events of the responses that can be read as a stream.
    """

    def __init__(self) -> None:
        """Begin without responses."""
        self._running: dict[str, tuple[RunningResponse, asyncio.Task[None]]] = {}
        self.logs = EventLogs()

    async def start(self, run: RunningResponse, *, is_streamed: bool) -> None:
        """Run a response as a task; keep its events for readers if `is_streamed`."""
        try:
            await run.keep()
        except BaseException:
            # A response that cannot be stored could never be read, so it must not run.
            run.close()
            raise
        if is_streamed:
            self.logs.open(run.id)
        task = asyncio.create_task(self._finish(run))
        self._running[run.id] = (run, task)

    def running(self, response_id: str) -> dict[str, Any] | None:
        """Return the current state of a running response; None if it is not running."""
        run, _ = self._running.get(response_id, (None, None))
        return None if run is None else run.response

    def follow(self, response_id: str, start: int) -> AsyncGenerator[Chunk, None] | None:
        """Return the events of a response from index `start` on; None if they are not kept."""
        log = self.logs.get(response_id)
        return None if log is None else log.follow(start)

    async def cancel(self, response_id: str) -> bool:
        """Cancel a response; return whether it was running."""
        run, task = self._running.pop(response_id, (None, None))
        if run is None or task is None:
            return False
        # The abort ends the engine's request, and with it the events.
        run.abort()
        _, unfinished = await asyncio.wait([task], timeout=ABORT_TIMEOUT_S)
        if unfinished:
            task.cancel()
            await asyncio.wait([task])
            await run.cancel()
        return True

    async def _finish(self, run: RunningResponse) -> None:
        log = self.logs.get(run.id)
        try:
            async with contextlib.aclosing(run.streamed(run.chunks())) as events:
                async for each in events:
                    if log is not None:
                        await log.add(_encoded(each))
        finally:
            self._running.pop(run.id, None)
            if log is not None:
                await log.end()
                self.logs.make_room()


def _encoded(event: dict[str, Any]) -> bytes:
    chunk = named_event(event["type"], event)
    return chunk if isinstance(chunk, bytes) else b"".join(chunk)
