"""Answers of a hundred megabytes: too large ones are refused, and memory of others is freed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.test_loop_stalls import Attack, send, tops
from tests.support.processes import resident_kb
from tests.support.server import ROOT, ServerProcess

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--model-path", str(ROOT / "headrace/demo/model"), plain=True) as server:
        yield server.wait_ready()


def test_an_answer_that_would_weigh_too_much_is_refused(server: ServerProcess) -> None:
    before = resident_kb(server.process.pid)
    status, begin, _ = send(server, Attack("/generate", tops(128, 1990), 400))
    assert status == 400
    assert b"at most 33554432 numbers" in begin
    # Sample by sample, all of them together; two numbers each.
    assert str(128 * 1990 * 1000 * 2).encode() in begin
    assert resident_kb(server.process.pid) - before < 10_000


def test_memory_of_large_answers_is_given_back(server: ServerProcess) -> None:
    attack = Attack("/generate", tops(128, 30), 200)
    send(server, attack)
    before = resident_kb(server.process.pid)
    for _ in range(2):
        status, _, size = send(server, attack)
        # Each is more than the process may grow.
        assert (status, size > 100_000_000) == (200, True)
    assert resident_kb(server.process.pid) - before < 60_000
