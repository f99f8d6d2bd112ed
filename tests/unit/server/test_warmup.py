"""The server's request to itself: what it learns from the answer, and which answers fail."""

from __future__ import annotations

import asyncio

import pytest

from runtime.config.options import HttpArgs
from runtime.errors import StartupError
from server.warmup import read_answer, warm_up

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def event(count: int) -> bytes:
    data = b'data: {"text":" a","meta_info":{"completion_tokens":%d,"cached_tokens":0}}\n\n' % count
    return b"%x\r\n%s\r\n" % (len(data), data)


class Pieces(asyncio.StreamReader):
    """What arrives piece by piece, a quarter of a second apart."""

    def __init__(self, *pieces: bytes) -> None:
        super().__init__()
        self.pieces, self.now_s = list(pieces), 0.0

    async def read(self, n: int = -1) -> bytes:
        self.now_s += 0.25
        return self.pieces.pop(0) if self.pieces else b""

    def clock(self) -> float:
        return self.now_s


async def test_it_learns_how_quick_an_answer_is() -> None:
    # The first event waits for the prompt; two tokens may come together; an event may come in two.
    late = event(7)
    pieces = Pieces(HEAD, event(1), event(2), event(4), event(6), late[:40], late[40:])
    answer, speed = await read_answer(pieces, pieces.clock)
    assert answer.endswith(late)
    # The second to the seventh, in four steps.
    assert speed == 5 / (4 * 0.25)


@pytest.mark.parametrize("pieces", [[event(1), event(2)], [b'{"embedding": [0.1]}'], []])
async def test_a_short_answer_tells_nothing(pieces: list[bytes]) -> None:
    arriving = Pieces(HEAD, *pieces)
    assert (await read_answer(arriving, arriving.clock))[1] is None


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
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.writelines(pieces if head.startswith(b"POST") else [HEAD])
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(StartupError, match="POST /generate failed"):
            await warm_up(HttpArgs(), port, 1)
