"""`kill -9` of a further rank, of its parent and of the front: nothing hangs, nothing is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.faults.test_kill import Clients, children_by_name, is_ready, restarts, wait_gone
from tests.support.processes import alive, children, command
from tests.support.server import ServerProcess
from tests.support.tiny_models import tiny_model
from tests.support.waiting import until


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """A server of two ranks; of a test with the parameter "front", it is a command."""
    args = ("--model-path", str(tiny_model("llama")), "--tp-size", "2", "--num-threads", "1")
    plain = "front" in request.node.name
    with ServerProcess(*args, plain=plain) as server:
        yield server


def _ranks(server: ServerProcess) -> list[int]:
    worker = children_by_name(server).get("scheduler")
    found = [] if worker is None else children(worker)
    # Libraries ask programs about the machine, which come and go.
    return [pid for pid in found if command(pid)[-1:] == ["rank"]]


def test_a_killed_rank_ends_the_worker_which_is_replaced(server: ServerProcess) -> None:
    server.wait_ready()
    worker, (rank,) = children_by_name(server)["scheduler"], _ranks(server)
    num_restarts = restarts(server)
    clients = Clients(server.url, 3)
    clients.wait_started()
    os.kill(rank, signal.SIGKILL)
    wait_gone(server, num_restarts)
    clients.join()
    assert len(clients.endings) == 3
    until(lambda: is_ready(server), 90, "never ready again")
    assert not alive(worker)
    lines = [line for line in server.lines if "Rank 1 of the worker was ended by SIGKILL" in line]
    assert len(lines) == 1, server.log
    assert "Traceback" not in server.log
    body = {"text": "The", "sampling_params": {"max_new_tokens": 4}}
    assert server.client.post("/generate", json=body, timeout=30).status_code == 200
    left = [*server.child_pids(), *_ranks(server)]
    server.stop()
    until(lambda: not any(map(alive, left)), 5, "an orphan is left")


@pytest.mark.parametrize("victim", ["scheduler", "front"])
def test_no_rank_outlives_its_parents(server: ServerProcess, victim: str) -> None:
    server.wait_ready()
    ranks = _ranks(server)
    assert len(ranks) == 1
    clients = Clients(server.url, 3)
    clients.wait_started()
    if victim == "front":
        server.signal(signal.SIGKILL)
    else:
        os.kill(children_by_name(server)["scheduler"], signal.SIGKILL)
    clients.join()
    until(lambda: not any(map(alive, ranks)), 5, "an orphan is left")
    if victim == "scheduler":
        until(lambda: is_ready(server), 90, "never ready again")


def test_a_rank_that_dies_while_loading_is_one_line(server: ServerProcess) -> None:
    until(lambda: bool(_ranks(server)), 60, "no rank was started")
    os.kill(_ranks(server)[0], signal.SIGKILL)
    assert server.wait_exit() == 1
    errors = [line for line in server.lines if line.startswith("headrace: ")]
    assert len(errors) == 1, server.log
    assert "Rank 1 of the worker was ended by SIGKILL" in errors[0]
    assert "Traceback" not in server.log
