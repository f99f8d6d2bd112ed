"""The server's request to itself: what it learns from the answer, and which answers fail."""

from __future__ import annotations

import asyncio

import pytest

from runtime.config.options import HttpArgs
from runtime.errors import StartupError
from server.warmup import warm_up

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
PAUSE_S = 0.02


def event(count: int) -> bytes:
    data = b'data: {"text":" a","meta_info":{"completion_tokens":%d,"cached_tokens":0}}\n\n' % count
    return b"%x\r\n%s\r\n" % (len(data), data)


async def ask(*pieces: bytes, path: str = "/generate") -> float | None:
    """What a warm-up learns from a server that answers a POST with `pieces`, in turn."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        for piece in pieces if head.startswith(b"POST") else [HEAD]:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(PAUSE_S)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        return await warm_up(HttpArgs(), port, 1, path=path)


async def test_it_learns_how_quick_an_answer_is() -> None:
    # The first event waits for the prompt; two tokens may come together; an event may come in two.
    late = event(7)
    speed = await ask(HEAD, event(1), event(2), event(4), event(6), late[:60], late[60:])
    assert speed is not None
    # Five tokens in at least four pauses; a busy machine makes them longer.
    assert 0 < speed <= 5 / (3 * PAUSE_S)


@pytest.mark.parametrize(
    ("pieces", "path"),
    [([HEAD, event(1), event(2)], "/generate"), ([HEAD, b'{"embedding": [0.1]}'], "/encode")],
)
async def test_a_short_answer_tells_nothing(pieces: list[bytes], path: str) -> None:
    assert await ask(*pieces, path=path) is None


@pytest.mark.parametrize(
    "pieces",
    [
        [b'HTTP/1.1 503 Service Unavailable\r\n\r\n{"error": "broken"}'],
        [HEAD, event(1), b'data: {"error": {"message": "broken"}}\n\ndata: [DONE]\n\n'],
        [HEAD, event(1), b'data: {"error":{"message":"broken"}}\n\ndata: [DONE]\n\n'],
        [b""],
    ],
)
async def test_an_error_ends_the_start(pieces: list[bytes]) -> None:
    with pytest.raises(StartupError, match="POST /generate failed"):
        await ask(*pieces)
