"""Responses that run in the background, independent of a client's connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from openai_api.responses.event_log import EventLogs
from runtime.service.generation import Chunk, Indexed, named_event

# How long to wait until the engine reports that it has stopped.
ABORT_TIMEOUT_S = 10.0


Event = dict[str, Any]


class RunningResponse(Protocol):
    """A response that runs in the background; `ResponseRun` implements it."""

    id: str
    response: dict[str, Any]

    def chunks(self) -> AsyncGenerator[Indexed, None]:
        """The engine's chunks, for `streamed`."""

    def streamed(self, chunks: AsyncGenerator[Indexed, None]) -> AsyncGenerator[Event, None]:
        """Yield every event in order; a failure is the last event."""

    async def keep(self) -> None:
        """Store the current state of the response, if the request says so."""

    def close(self) -> None:
        """Stop, and abort the requests that still run."""

    def abort(self) -> None:
        """Abort the engine's request; the events still come, up to the last one."""

    async def cancel(self) -> None:
        """End the response before the model does."""


class BackgroundResponses:
    """Running background responses; each is also in the store, where later requests find it.

    Attributes:
        logs: events of the responses that can be read as a stream.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._running: dict[str, tuple[RunningResponse, asyncio.Task[None]]] = {}
        self.logs = EventLogs()

    async def start(self, run: RunningResponse, *, is_streamed: bool) -> None:
        """Start `run` as a task of its own; its events are kept if `is_streamed`."""
        try:
            await run.keep()
        except BaseException:
            # The response could not be retrieved, so the engine must not generate it.
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
        """Return the events of a response from number `start` on; None if they are not kept."""
        log = self.logs.get(response_id)
        return None if log is None else log.follow(start)

    async def cancel(self, response_id: str) -> bool:
        """End a response; return whether it still ran."""
        run, task = self._running.pop(response_id, (None, None))
        if run is None or task is None:
            return False
        # When the engine ends the request, its events end too.
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
