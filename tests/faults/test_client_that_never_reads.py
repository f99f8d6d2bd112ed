"""A client that never reads, over a socket of the system: its stream ends, what waits is bounded.

Only the time that it has is shorter here than the server's minute.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from server.connection_limit import ConnectionLimit
from server.event_stream import EventStream
from server.protocol import GuardedProtocol
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


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncGenerator[tuple[int, set[Any]], None]:
    """Serve `app` by the protocol of the product; the port and the connections that are open."""
    protocol: Callable[..., Any] = partial(
        GuardedProtocol, limit=ConnectionLimit(100), take_timeout_s=TIMEOUT_S
    )
    config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve([listener]))
        await until_in_loop(lambda: server.started)
        try:
            yield listener.getsockname()[1], server.server_state.connections
        finally:
            for connection in list(server.server_state.connections):
                cast("GuardedProtocol", connection).cut_off()
            server.should_exit = server.force_exit = True
            await serving


async def test_its_stream_ends_and_others_go_on() -> None:
    events = Events()
    async with served(events) as (port, connections):
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
    async with served(events) as (port, connections):
        with socket.create_connection(("127.0.0.1", port)) as silent:
            silent.sendall(REQUEST)
            await until_in_loop(lambda: events.num_closed == 1)
            assert 0 < events.num_made < MAX_EVENTS
            await until_in_loop(lambda: not connections)


async def test_a_whole_answer_that_nobody_takes_goes() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(EVENT * MAX_EVENTS)(scope, receive, send)

    async with served(app) as (port, connections):
        with socket.create_connection(("127.0.0.1", port)) as silent:
            silent.sendall(REQUEST)
            await until_in_loop(lambda: bool(connections))
            await until_in_loop(lambda: not connections)
