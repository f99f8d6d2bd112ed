"""Server-sent events as ready-made bytes, and work that ends when its client goes away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from openai_api.errors import describe_error, error_event
from runtime.errors import HeadraceError

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
# A client that takes nothing for this long loses its request, and nobody else waits for it.
SEND_TIMEOUT_S = 60.0


class ClientGone(HeadraceError):
    """The client closed the connection before its answer was complete; nobody reads this."""

    status_code = 499


def event(content: dict[str, Any]) -> bytes:
    """One event with a JSON payload."""
    return b"data: " + orjson.dumps(content) + b"\n\n"


def _openai_error(error: Exception) -> bytes:
    return error_event(describe_error(error))


async def with_errors(
    events: AsyncGenerator[bytes, None], as_event: Callable[[Exception], bytes] = _openai_error
) -> AsyncGenerator[bytes, None]:
    """The same events; a failure becomes a last event, and the end mark always comes."""
    async with contextlib.aclosing(events):
        try:
            async for chunk in events:
                yield chunk
        except Exception as error:
            yield as_event(error)
        yield DONE


class EventStream(Response):
    """Answers 200 and sends events until they end or the client goes away."""

    def __init__(self, events: AsyncGenerator[bytes, None], on_end: Callable[[], None]) -> None:
        """Send `events`; however the response ends, `on_end` is called.

        A generator that nobody has begun to read runs none of its own clean-up, so the requests
        behind `events` are let go by `on_end`.
        """
        self.status_code = 200
        self.media_type = "text/event-stream"
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        # Of unknown length: it ends when it ends.
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            await unless_disconnected(receive, self._write(send))
        except (ClientGone, TimeoutError, OSError):
            # Nobody is left to tell.
            pass
        finally:
            self._on_end()
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for chunk in self._events:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, cancelling it when the client goes away first.

    Raises:
        ClientGone: the client went away.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_until_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone("The client closed the connection.")
    finally:
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
