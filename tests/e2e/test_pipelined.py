"""Pipelined requests behind a running one, and a client that disconnects."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.native import load, slowed
from tests.support.server import ServerProcess, common_server
from tests.support.waiting import until

LIVEZ = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
# At half a minute for each answer, one that runs to its end is told from one that is given up.
NUM_TOKENS, STEP_S = 200, 0.15


@pytest.fixture(scope="module")
def server() -> ServerProcess:
    return common_server()


def post(path: str, **body: Any) -> bytes:
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload


def generate(num_tokens: int = NUM_TOKENS, **more: Any) -> bytes:
    sampling = {"max_new_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    return post("/generate", input_ids=[5, 6, 7], sampling_params=sampling, **more)


def chat() -> bytes:
    messages = [{"role": "user", "content": "a"}]
    more = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    return post("/v1/chat/completions", model="m", messages=messages, **more)


def connect(server: ServerProcess) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def wait_running(server: ServerProcess, count: int) -> float:
    """Seconds until so many requests run."""
    started = time.monotonic()
    until(lambda: load(server)["num_running_reqs"] == count)
    return time.monotonic() - started


@pytest.fixture(scope="module")
def slow(server: ServerProcess) -> Iterator[None]:
    with slowed(server, STEP_S):
        yield


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (generate(), LIVEZ),
        (generate(), generate()),
        (generate(), LIVEZ * 50),
        # So long a body that the server stops reading.
        (generate(), generate(pad="x" * 200_000)),
        (generate(stream=True), LIVEZ),
        (chat(), LIVEZ),
    ],
    ids=["get", "post", "many", "long", "stream", "chat"],
)
def test_a_client_that_leaves_is_noticed_behind_a_further_request(
    server: ServerProcess, first: bytes, second: bytes, reset: bool
) -> None:
    num_lines = len(server.lines)
    with connect(server) as connection:
        connection.sendall(first + second)
        wait_running(server, 1)
        if reset:
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    assert wait_running(server, 0) < NUM_TOKENS * STEP_S / 2
    # The line of a request that comes after all that is said about these.
    server.client.get("/v1/models", headers={"x-request-id": f"after-{num_lines}"})
    server.wait_for_line(f"after-{num_lines}")
    said = "\n".join(server.lines[num_lines:])
    assert "Traceback" not in said
    assert "ERROR" not in said


def test_answers_come_in_the_order_of_the_requests(server: ServerProcess) -> None:
    models = LIVEZ.replace(b"/livez", b"/v1/models")
    with connect(server) as connection:
        connection.sendall(generate(4) + models + generate(5) + models)
        answer = b""
        while answer.count(b"HTTP/1.1 200") < 4 or not answer.endswith(b"}"):
            part = connection.recv(65536)
            assert part, answer
            answer += part
    bodies = [part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200")[1:]]
    found = [json.loads(body) for body in bodies]
    assert [each.get("object") for each in found] == [None, "list", None, "list"]
    assert [each["meta_info"]["completion_tokens"] for each in (found[0], found[2])] == [4, 5]
