"""A fork that fails does not affect other forks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from runtime.ipc.fork_server import ForkServer


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    found = ForkServer("tests.support.trying_forks", "trying")
    yield found
    found.stop()


@pytest.mark.parametrize(
    ("job", "answers"),
    [
        (b"crash", {b"none"}),
        (b"eat", {b"none"}),
        (b"fail", {b"none"}),
        (b"hang", {b"busy"}),
        # On a busy machine it does not get the time that would show what it costs.
        (b"spin", {b"none", b"busy"}),
        (b"well", {b"did well"}),
    ],
)
def test_a_fork_ends_alone(server: ForkServer, job: bytes, answers: set[bytes]) -> None:
    assert server.ask(b"well") == b"did well"
    pid = server.pid
    with ThreadPoolExecutor(2) as pool:
        attempt = pool.submit(server.ask, job)
        # Beside it the others work on.
        assert list(pool.map(server.ask, [b"a", b"b"])) == [b"did a", b"did b"]
        assert attempt.result() in answers
    assert server.pid == pid


def test_it_may_be_stopped_and_asked_again() -> None:
    server = ForkServer("tests.support.trying_forks", "trying")
    server.stop()
    assert server.ask(b"a" * 2**22) == b"did " + b"a" * 2**22
    server.stop()
    assert server.pid is None
    assert server.ask(b"b") == b"did b"
    server.stop()
