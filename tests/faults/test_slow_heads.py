"""Clients that send their head a byte at a time are disconnected, without delaying others.

The time for a head is shorter here than the server's half minute.
"""

from __future__ import annotations

import asyncio
import contextlib

from starlette.responses import PlainTextResponse

from tests.support.served_app import served

NUM_SLOW = 50
HEAD_S = 1.0
WITHIN_S = 60
WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def _trickle(port: int) -> float:
    """Send a head without end; seconds until the connection is closed, with no answer."""
    began = asyncio.get_running_loop().time()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nX: ")
    closed = asyncio.create_task(reader.read())
    while not closed.done():
        writer.write(b"a")
        await asyncio.wait([closed], timeout=HEAD_S / 20)
    # A byte that comes when the server has just closed the connection resets it.
    with contextlib.suppress(ConnectionResetError):
        assert await closed == b""
    writer.close()
    return asyncio.get_running_loop().time() - began


async def test_a_head_has_its_time() -> None:
    async with served(PlainTextResponse("whole"), head_timeout_s=HEAD_S) as (port, connections):
        slow = [asyncio.create_task(_trickle(port)) for _ in range(NUM_SLOW)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(WITHIN_S):
            num_answered = 0
            while not all(each.done() for each in slow):
                # Who sends its heads is answered meanwhile; each has a time of its own.
                writer.write(WHOLE)
                assert (await reader.readuntil(b"whole")).startswith(b"HTTP/1.1 200")
                num_answered += 1
                await asyncio.sleep(0)
            assert min([await each for each in slow]) >= HEAD_S
        assert num_answered > 1
        assert len(connections) == 1
        writer.close()
