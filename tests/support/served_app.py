"""Serves an application with this product's HTTP protocol, in this process, on a real socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from server.connection_limit import ConnectionLimit
from server.protocol import GuardedProtocol
from tests.support.waiting import until_in_loop


@asynccontextmanager
async def served(app: ASGIApp, **limits_s: float) -> AsyncGenerator[tuple[int, set[Any]], None]:
    """Serve `app`; yield the port and the set of open connections.

    Args:
        app: the ASGI application.
        **limits_s: time limits of `GuardedProtocol`, shorter than a real server's.
    """
    protocol: Callable[..., Any] = partial(GuardedProtocol, limit=ConnectionLimit(100), **limits_s)
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
