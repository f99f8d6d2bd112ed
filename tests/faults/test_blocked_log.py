"""Standard error that accepts no bytes: the server starts, answers and ends as usual."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO

import httpx

from tests.support.guard import unwatch, watch
from tests.support.server import ROOT, free_port, python_path
from tests.support.tiny_models import tiny_model
from tests.support.waiting import until

# More lines than wait in memory, of the longest kind.
NUM_REQUESTS = 2000
PATH, REQUEST_ID = "/" + "a" * 127, "b" * 128
BODY = {"text": "The wheel", "sampling_params": {"max_new_tokens": 4}}
LOST = re.compile(r"\[([a-z]+)\] (\d+) lines of the log were lost")


@contextlib.contextmanager
def server_with(stderr: int | IO[bytes], *args: str) -> Iterator[httpx.Client]:
    """A server whose standard error is `stderr`, known to be ready by its routes alone."""
    port = free_port()
    model = ("--model-path", str(tiny_model("qwen3")), "--port", str(port))
    process = subprocess.Popen(
        [sys.executable, "-m", "server.launch", *model, *args],
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    watch(process.pid)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            wait_ready(client, process)
            yield client
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        unwatch(process.pid)


def wait_ready(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    def is_ready() -> bool:
        assert process.poll() is None, "the server ended"
        with contextlib.suppress(httpx.TransportError):
            return client.get("/readyz", timeout=5).status_code == 200
        return False

    until(is_ready, 90, "the server does not get ready")


async def ask_many(url: str) -> list[float]:
    """Send requests that all leave lines in the logs; seconds that `/livez` took beside them."""
    waits = []
    limits = httpx.Limits(max_connections=17)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        left = iter(range(NUM_REQUESTS))

        async def ask() -> None:
            for number in left:
                if number % 20:
                    answer = await client.get(PATH, headers={"x-request-id": REQUEST_ID})
                    assert answer.status_code == 404
                else:
                    answer = await client.post("/generate", json=BODY)
                    assert answer.status_code == 200

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask()) for _ in range(16)]
            while (await asyncio.wait(tasks, timeout=0.05))[1]:
                began = time.monotonic()
                assert (await client.get("/livez")).status_code == 200
                waits.append(time.monotonic() - began)
    return waits


def test_a_pipe_that_nobody_reads():
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    args = ("--log-level", "debug", "--log-requests")
    with os.fdopen(reader, "rb") as source:
        with server_with(writer, *args) as client:
            os.close(writer)
            waits = asyncio.run(ask_many(str(client.base_url)))
            assert max(waits) < 10
            # Read again: what was lost is said.
            with ThreadPoolExecutor(1) as pool:
                text = pool.submit(read_until_lost, source).result(60)
        assert "Traceback" not in text
    assert {process for process, _ in LOST.findall(text)} >= {"front"}


def read_until_lost(source: IO[bytes]) -> str:
    text = ""
    while not LOST.search(text):
        text += os.read(source.fileno(), 2**16).decode(errors="replace")
    return text


def test_a_full_device():
    with open("/dev/full", "wb") as full, server_with(full, "--log-requests") as client:
        for _ in range(20):
            assert client.post("/generate", json=BODY).status_code == 200
        assert client.get("/livez").status_code == 200
