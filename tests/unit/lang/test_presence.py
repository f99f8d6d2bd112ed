"""A server that has gone is an error within seconds; one that is slow is waited for."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import headrace as sgl
from headrace.lang.backend.presence import Presence
from headrace.lang.program_errors import ProgramError
from tests.support.waiting import until_in_loop

ANSWER = json.dumps({"model_path": "fake"}).encode()
HEAD = f"HTTP/1.1 200 OK\r\nContent-Length: {len(ANSWER)}\r\nConnection: close\r\n\r\n".encode()


@sgl.function
def ask(s):
    s += "Hello"
    s += sgl.gen("word", max_tokens=4)


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that tells its model once, and then accepts connections and nothing else."""
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                if not kept:
                    connection.recv(65536)
                    connection.sendall(HEAD + ANSWER)
                kept.append(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in kept:
            connection.close()


def test_reading_a_variable_of_a_server_that_has_gone_raises(silent: str) -> None:
    backend = sgl.RuntimeEndpoint(silent, chat_template_name="chatml")

    def read(stream: bool) -> None:
        state = ask.run(backend=backend, stream=stream)
        # The text that was there is no error; the variable is.
        if stream:
            assert list(state.text_iter("word")) == []
        else:
            state["word"]

    started_at = time.monotonic()
    with ThreadPoolExecutor() as pool:
        for each in [pool.submit(read, stream) for stream in (False, True)]:
            with pytest.raises(ProgramError, match="the server no longer answers"):
                each.result(30)
    assert time.monotonic() - started_at < 20
    # Those that come later hear it sooner.
    started_at = time.monotonic()
    with pytest.raises(ProgramError, match="no longer answers"):
        read(stream=False)
    assert time.monotonic() - started_at < 8
    backend.shutdown()


async def test_a_server_that_is_slow_is_waited_for() -> None:
    num_asked = 0

    async def asked() -> None:
        nonlocal num_asked
        num_asked += 1

    async def work() -> str:
        await until_in_loop(lambda: num_asked >= 3)
        return "done"

    presence = Presence(asked, quiet_s=0.05, answer_s=5)
    found = await asyncio.gather(*(presence.while_there(work()) for _ in range(20)))
    assert found == ["done"] * 20
    # All of them share the questions.
    assert num_asked < 20


async def test_one_answer_that_is_lost_is_not_the_end() -> None:
    answers = iter([False, True, False, True, True])
    num_answered = 0

    async def asked() -> None:
        nonlocal num_answered
        if not next(answers, True):
            await asyncio.Event().wait()
        num_answered += 1

    async def work() -> str:
        await until_in_loop(lambda: num_answered >= 2)
        return "done"

    presence = Presence(asked, quiet_s=0.05, answer_s=0.05)
    assert await presence.while_there(work()) == "done"


async def test_what_waits_is_cancelled_with_the_server() -> None:
    was_cancelled = asyncio.Event()

    async def refused() -> None:
        raise ConnectionRefusedError

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()

    presence = Presence(refused, quiet_s=0.05, answer_s=0.05)
    with pytest.raises(TimeoutError):
        await presence.while_there(work())
    await asyncio.wait_for(was_cancelled.wait(), 1)
