"""Sends responses while they are generated, and stops the work if the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any, Self, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from runtime.errors import HeadraceError
from runtime.eventloop.json_pieces import encode
from runtime.eventloop.time_slices import in_turns
from runtime.requests.arrival import ARRIVAL, BLOCKED_S
from runtime.service.generation import DONE, Chunk

T = TypeVar("T")

# Seconds. If a client reads nothing for so long, its request is aborted.
SEND_TIMEOUT_S = 60.0


class ClientGone(HeadraceError):
    """The client closed the connection before its answer was complete; it is only logged."""

    status_code = 499


def json_answer(content: Any) -> Response:
    """Return a complete JSON response, in which lists may be `Pieces` (encoded while sending)."""
    data = encode(content)
    if isinstance(data, bytes):
        return Response(data, media_type="application/json")
    return SlicedResponse(data)


class SlicedResponse(Response):
    """A response with status 200 whose JSON is encoded in slices while it is sent."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        """Prepare to send `pieces`, the parts of the JSON text."""
        super().__init__(media_type="application/json")
        # The length is not known in advance, so the header is removed.
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        async def one() -> AsyncGenerator[Chunk, None]:
            yield self._pieces

        # If the client has left, an error cannot be sent.
        with contextlib.suppress(ClientGone, TimeoutError, OSError):
            await unless_disconnected(receive, _write(send, self.raw_headers, one()))


async def with_errors(
    events: AsyncGenerator[Chunk, None], as_event: Callable[[Exception], Chunk], end: bytes = DONE
) -> AsyncGenerator[Chunk, None]:
    """Yield the events, an error event if `events` raises an exception, and the bytes `end`."""
    async with contextlib.aclosing(events):
        try:
            async for chunk in events:
                yield chunk
        except Exception as error:
            yield as_event(error)
        if end:
            yield end


class EventStream(Response):
    """A response with status 200 that sends events until they end or the client disconnects."""

    def __init__(
        self,
        events: AsyncGenerator[Chunk, None],
        on_end: Callable[[], None],
        timeout_s: float = SEND_TIMEOUT_S,
        media_type: str = "text/event-stream",
    ) -> None:
        """Prepare to send `events`.

        Args:
            events: the encoded events.
            on_end: called however the response ends. It releases the requests behind `events`,
                because a generator that was never started does not run its own clean-up.
            timeout_s: seconds that the client has to read each event.
            media_type: the media type of the stream.
        """
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        # The length is not known in advance, so the header is removed.
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._events = events
        self._on_end = on_end
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            work = _write(send, self.raw_headers, self._events, self._timeout_s)
            await unless_disconnected(receive, work)
        except (ClientGone, TimeoutError, OSError):
            # The client has left, so the error cannot be sent.
            pass
        finally:
            self._on_end()
            await self._events.aclose()


async def _write(
    send: Send,
    headers: list[tuple[bytes, bytes]],
    chunks: AsyncGenerator[Chunk, None],
    timeout_s: float = SEND_TIMEOUT_S,
) -> None:
    async with _SendInTime(send, timeout_s) as send_in_time:
        await send_in_time({"type": "http.response.start", "status": 200, "headers": headers})
        async for chunk in chunks:
            if isinstance(chunk, bytes):
                await send_in_time({"type": "http.response.body", "body": chunk, "more_body": True})
                continue
            async for part in in_turns(chunk):
                await send_in_time({"type": "http.response.body", "body": part, "more_body": True})
        await send_in_time({"type": "http.response.body", "body": b"", "more_body": False})


class _SendInTime:
    """Wraps an ASGI `send` so that a call that takes longer than `limit_s` ends the `with` block.

    One timer watches all calls, because a timer for each call took a fifth of the time of an event.

    Raises:
        TimeoutError: raised from the block, when a call took too long.
    """

    def __init__(self, send: Send, limit_s: float) -> None:
        self._send = send
        self._limit_s = limit_s
        self._since: float | None = None
        self._arrival = ARRIVAL.get()
        self._limit = asyncio.timeout(None)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(limit_s, self._check)

    async def __call__(self, message: Message) -> None:
        self._since = since = self._loop.time()
        await self._send(message)
        self._since = None
        # uvloop's time advances only when a task waits, so a call without waiting counts as 0.
        if self._loop.time() - since > BLOCKED_S and self._arrival is not None:
            self._arrival.blocked_s += self._loop.time() - since

    def _check(self) -> None:
        now = self._loop.time()
        left_s = self._limit_s if self._since is None else self._since + self._limit_s - now
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check)
        else:
            self._limit.reschedule(now)

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        self._timer.cancel()
        await self._limit.__aexit__(*raised)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work` and return its result; cancel it if the client disconnects first.

    Raises:
        ClientGone: the client disconnected.
    """
    # The watcher makes this timeout expire, so `work` needs no task of its own.
    limit = asyncio.timeout(None)
    watcher = asyncio.create_task(_end_when_disconnected(receive, limit))
    try:
        async with limit:
            return await work
    except TimeoutError:
        if limit.expired():
            raise ClientGone("The client closed the connection.") from None
        raise
    finally:
        watcher.cancel()


async def _end_when_disconnected(receive: Receive, limit: asyncio.Timeout) -> None:
    # A connection that fails counts as disconnected.
    with contextlib.suppress(Exception):
        while (await receive())["type"] != "http.disconnect":
            pass
    limit.reschedule(asyncio.get_running_loop().time())
