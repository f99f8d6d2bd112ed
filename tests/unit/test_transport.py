"""Bytes that do not decode are dropped and counted by every receiver."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from runtime.ipc.messages import DetokenizerInbound, FrontInbound, Ping, SchedulerInbound
from runtime.ipc.transport import MAX_FRAME_BYTES, AsyncInbox, Inbox
from tests.support.frames import BAD_FRAMES, frame_header, push_peer

GOOD = msgspec.msgpack.encode(Ping(7))


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(0)


def sender(context: zmq.Context[Any], address: str) -> Any:
    socket = context.socket(zmq.PUSH)
    socket.connect(address)
    return socket


def receive(inbox: Inbox[Any], count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        assert inbox.wait(20), "nothing came"
        found += inbox.drain()
    return found


@pytest.mark.parametrize("union", [SchedulerInbound, DetokenizerInbound, FrontInbound])
def test_nothing_that_is_decoded_raises(
    tmp_path: Path, context: zmq.Context[Any], union: Any
) -> None:
    address = f"ipc://{tmp_path}/inbox"
    counts: list[int] = []
    inbox: Inbox[Any] = Inbox(context, address, union | Ping, counts.append)
    outbox = sender(context, address)

    @given(payload=st.binary(max_size=60))
    def check(payload: bytes) -> None:
        decoder = msgspec.msgpack.Decoder(union | Ping)
        # By chance it may be a message.
        with contextlib.suppress(Exception):
            decoder.decode(payload)
            return
        before = inbox.num_rejected
        outbox.send(payload)
        outbox.send(GOOD)
        assert receive(inbox, 1) == [Ping(7)]
        assert inbox.num_rejected == before + 1

    check()
    before = inbox.num_rejected
    for payload in BAD_FRAMES:
        outbox.send(payload)
    outbox.send(GOOD)
    assert receive(inbox, 1) == [Ping(7)]
    assert inbox.num_rejected == before + len(BAD_FRAMES)
    assert counts == list(range(1, inbox.num_rejected + 1))


async def test_the_front_goes_on_receiving(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    address = f"ipc://{tmp_path}/inbox"
    counts: list[int] = []
    inbox: AsyncInbox[Ping] = AsyncInbox(context, address, FrontInbound | Ping, counts.append)
    outbox = sender(context, address)
    for payload in BAD_FRAMES:
        outbox.send(payload)
    outbox.send(GOOD)
    async with asyncio.timeout(20):
        assert await inbox.receive() == Ping(7)
    assert counts == list(range(1, len(BAD_FRAMES) + 1))
    outbox.close(0)
    inbox.close()
    context.destroy(0)


def test_a_flood_is_few_lines(
    tmp_path: Path, context: zmq.Context[Any], caplog: pytest.LogCaptureFixture
) -> None:
    address = f"ipc://{tmp_path}/inbox"
    inbox: Inbox[Any] = Inbox(context, address, SchedulerInbound)
    outbox = sender(context, address)
    for _ in range(1000):
        outbox.send(b"\xc1")
    outbox.send(GOOD)
    receive(inbox, 1)
    assert inbox.num_rejected == 1000
    assert len(caplog.records) == 10


def test_who_announces_too_much_is_cut_off(tmp_path: Path, context: zmq.Context[Any]) -> None:
    address = f"ipc://{tmp_path}/inbox"
    inbox: Inbox[Any] = Inbox(context, address, SchedulerInbound)
    peer = push_peer(tmp_path / "inbox")
    peer.sendall(frame_header(MAX_FRAME_BYTES + 1) + b"x")
    assert peer.recv(1) == b""
    peer.close()
    # One that is allowed, and breaks off.
    peer = push_peer(tmp_path / "inbox")
    peer.sendall(frame_header(1 << 20) + b"x")
    peer.close()
    sender(context, address).send(GOOD)
    assert receive(inbox, 1) == [Ping(7)]
