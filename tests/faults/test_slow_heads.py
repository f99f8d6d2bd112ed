"""Clients that send their head a byte at a time lose their connection; nobody waits for them."""

from __future__ import annotations

import select
import socket
import time

import pytest

from server.protocol import HEAD_TIMEOUT_S
from tests.support.neighbours import Neighbours, greedy
from tests.support.server import ServerProcess
from tests.support.tiny_models import tiny_model

NUM_SLOW = 50


@pytest.mark.slow
def test_a_head_has_half_a_minute() -> None:
    with ServerProcess("--model-path", str(tiny_model("qwen3"))) as server:
        server.wait_ready()
        solo = greedy(server)
        started = time.monotonic()
        address = ("127.0.0.1", server.port)
        slow = [socket.create_connection(address, timeout=30) for _ in range(NUM_SLOW)]
        for each in slow:
            each.sendall(b"GET /livez HTTP/1.1\r\nX: ")
        with Neighbours(server) as neighbours:
            while slow:
                assert time.monotonic() - started < HEAD_TIMEOUT_S + 30, f"{len(slow)} are open"
                ended, _, _ = select.select(slow, [], [], 1)
                for each in ended:
                    # Closed, with no answer.
                    assert each.recv(100) == b""
                    each.close()
                    slow.remove(each)
                    assert time.monotonic() - started > HEAD_TIMEOUT_S - 1
                for each in [] if ended else slow:
                    each.sendall(b"a")
                assert server.client.get("/livez").status_code == 200
        assert set(neighbours.texts) == {solo}
