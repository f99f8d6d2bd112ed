"""Hundreds of clients vanish at any moment: the server keeps no resources for them.

HEADRACE_FAULT_ROUNDS=20 gives the long form.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

from tests.faults.test_kill import ROUNDS
from tests.support.native import until_idle
from tests.support.neighbours import Neighbours, greedy
from tests.support.processes import resident_kb
from tests.support.server import ServerProcess
from tests.support.tiny_models import tiny_model
from tests.support.waiting import until

NUM_CLIENTS = 200
RESET = struct.pack("ii", 1, 0)


def leave(server: ServerProcess, number: int) -> None:
    """Send a request and go: at once or after a token, with a reset or in order."""
    body = {
        "text": "The miller " * (1 + number % 7),
        "stream": number % 3 != 0,
        "sampling_params": {"max_new_tokens": 150, "ignore_eos": True, "n": 1 + number % 2},
    }
    content = json.dumps(body).encode()
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        if number % 3 == 1:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        if number % 2:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def num_files(pids: list[int]) -> list[int]:
    return [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]


def test_nothing_is_kept_for_clients_that_left() -> None:
    with ServerProcess("--model-path", str(tiny_model("qwen3")), plain=True) as server:
        server.wait_ready()
        solo = greedy(server)

        def storm() -> None:
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(lambda number: leave(server, number), range(NUM_CLIENTS)))

        storm()
        until_idle(server)
        pids = [server.process.pid, *server.child_pids()]
        files, memory = num_files(pids), [resident_kb(pid) for pid in pids]
        with Neighbours(server) as neighbours:
            for _ in range(ROUNDS):
                storm()
        assert set(neighbours.texts) == {solo}
        until_idle(server)
        until(
            lambda: all(now <= then for now, then in zip(num_files(pids), files, strict=True)),
            60,
            "files stay open",
        )
        grown = [resident_kb(pid) - then for pid, then in zip(pids, memory, strict=True)]
        assert max(grown) < 24_000, f"grown by {grown} kB"
        assert "Traceback" not in server.log
        # The pool's books are looked through.
        assert server.client.post("/flush_cache?timeout=10").status_code == 200
