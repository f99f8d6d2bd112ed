"""A client that never reads its socket: its stream ends, and the data that waits is bounded.

The client's time is shorter here than the server's minute.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.event_stream import EventStream
from tests.support.served_app import served
from tests.support.waiting import until_in_loop

TIMEOUT_S = 0.5
WITHIN_S = 60
EVENT = b"data: " + b"x" * 65_536 + b"\n\n"
# What the system's buffers of both ends hold is megabytes at most.
MAX_EVENTS = 1_000
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Events:
    """Streams without end; how many events were made, and how many streams ended."""

    def __init__(self) -> None:
        self.num_made = 0
        self.num_ended = 0
        self.num_closed = 0

    def _end(self) -> None:
        self.num_ended += 1

    async def _make(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                self.num_made += 1
                yield EVENT
                await asyncio.sleep(0)
        finally:
            self.num_closed += 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await EventStream(self._make(), self._end, TIMEOUT_S)(scope, receive, send)


async def test_its_stream_ends_and_others_go_on() -> None:
    events = Events()
    async with served(events, take_timeout_s=TIMEOUT_S) as (port, connections):
        with socket.create_connection(("127.0.0.1", port)) as silent:
            silent.sendall(REQUEST)
            await until_in_loop(lambda: events.num_made > 0)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST)
            async with asyncio.timeout(WITHIN_S):
                while events.num_ended == 0 or len(connections) > 1:
                    assert await reader.read(2**20), "a client that reads lost its stream"
            # The one that is left is read still.
            assert (events.num_ended, events.num_closed) == (1, 1)
            writer.transport.abort()
            await until_in_loop(lambda: events.num_closed == 2)


async def test_what_waits_for_it_is_bounded_and_goes() -> None:
    events = Events()
    async with served(events, take_timeout_s=TIMEOUT_S) as (port, connections):
        with socket.create_connection(("127.0.0.1", port)) as silent:
            silent.sendall(REQUEST)
            await until_in_loop(lambda: events.num_closed == 1)
            assert 0 < events.num_made < MAX_EVENTS
            await until_in_loop(lambda: not connections)


async def test_a_whole_answer_that_nobody_takes_goes() -> None:
    open_when_asked: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        open_when_asked.append(len(connections))
        await Response(EVENT * MAX_EVENTS)(scope, receive, send)

    async with served(app, take_timeout_s=TIMEOUT_S) as (port, connections):
        with socket.create_connection(("127.0.0.1", port)) as silent:
            silent.sendall(REQUEST)
            # Told by the application: on a busy machine the connection may be gone before we look.
            await until_in_loop(lambda: bool(open_when_asked))
            assert open_when_asked == [1]
            await until_in_loop(lambda: not connections)
