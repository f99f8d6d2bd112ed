"""`kill -9` of each process under load: no hung client, no orphan, the port usable again.

HEADRACE_FAULT_ROUNDS=20 gives the long form.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import httpx
import pytest

from tests.support.grammar_backends import BACKENDS
from tests.support.processes import alive, engine_processes
from tests.support.server import ServerProcess, free_port
from tests.support.tiny_models import tiny_model
from tests.support.waiting import until

ROUNDS = int(os.environ.get("HEADRACE_FAULT_ROUNDS", "2"))
LONG = {
    "text": "The mill",
    "stream": True,
    "sampling_params": {"max_new_tokens": 240, "temperature": 0, "ignore_eos": True},
}


class Clients:
    """Streams that must all come to an end, well or badly."""

    def __init__(self, url: str, count: int) -> None:
        self.first_event = threading.Semaphore(0)
        self.endings: list[str] = []
        self.threads = [
            threading.Thread(target=self._stream, args=(url,), daemon=True) for _ in range(count)
        ]
        for thread in self.threads:
            thread.start()

    def _stream(self, url: str) -> None:
        last = ""
        started = False
        try:
            with httpx.stream("POST", url + "/generate", json=LONG, timeout=60) as response:
                for line in response.iter_lines():
                    last = line or last
                    if not started:
                        started = True
                        self.first_event.release()
            self.endings.append(last)
        except httpx.HTTPError as error:
            self.endings.append(type(error).__name__)
        finally:
            if not started:
                self.first_event.release()

    def wait_started(self) -> None:
        for _ in self.threads:
            assert self.first_event.acquire(timeout=60)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(60)
        assert not [t for t in self.threads if t.is_alive()], "a client hangs"


def children_by_name(server: ServerProcess) -> dict[str, int]:
    return engine_processes(server.process.pid)


def is_ready(server: ServerProcess) -> bool:
    return server.client.get("/readyz").status_code == 200


def restarts(server: ServerProcess) -> int:
    return server.client.get("/server_info").json()["num_restarts"]


def wait_gone(server: ServerProcess, num_restarts: int) -> float:
    """Until a killed process is noticed; `num_restarts` is how many there were before.

    A detokenizer is back so soon that nobody may ask while it is away.
    """
    return until(
        lambda: not is_ready(server) or restarts(server) > num_restarts,
        20,
        "readiness stayed true",
    )


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_a_killed_child_is_replaced_behind_an_open_port(victim: str) -> None:
    # One of both as a command; the other one takes a sixth of the time for each start.
    plain = victim == "scheduler"
    with ServerProcess("--model-path", str(tiny_model("qwen3")), plain=plain) as server:
        server.wait_ready()
        noticed = []
        for _ in range(ROUNDS):
            clients = Clients(server.url, 4)
            clients.wait_started()
            pid, num_restarts = children_by_name(server)[victim], restarts(server)
            os.kill(pid, signal.SIGKILL)
            noticed.append(wait_gone(server, num_restarts))
            clients.join()
            assert server.client.get("/v1/models").status_code == 200
            until(lambda: is_ready(server), 90, "never ready again")
            assert children_by_name(server)[victim] != pid
            answer = server.client.post(
                "/generate",
                json={"text": "The", "sampling_params": {"max_new_tokens": 4}},
                timeout=60,
            )
            assert answer.status_code == 200
            assert answer.json()["meta_info"]["completion_tokens"] >= 1
        # Once a busy machine may be slow.
        assert min(noticed) < 1.0


def test_requests_in_flight_are_told_why() -> None:
    args = ("--model-path", str(tiny_model("qwen3")), "--max-resumes", "0")
    with ServerProcess(*args) as server:
        server.wait_ready()
        clients = Clients(server.url, 3)
        clients.wait_started()
        os.kill(children_by_name(server)["detokenizer"], signal.SIGSTOP)
        more = Clients(server.url, 3)
        time.sleep(0.3)
        os.kill(children_by_name(server)["scheduler"], signal.SIGKILL)
        clients.join()
        for thread in more.threads:
            thread.join(60)
        assert len(clients.endings) == 3
        until(lambda: is_ready(server), 90, "never ready again")


def test_nothing_outlives_a_killed_front() -> None:
    port = free_port()
    args = ("--model-path", str(tiny_model("qwen3")), "--port", str(port))
    backends = BACKENDS or ["none"]
    gone = []
    for number in range(ROUNDS):
        # The library for grammars that takes seconds to import, too: a child may be busy with it.
        server = ServerProcess(
            *args, "--grammar-backend", backends[number % len(backends)], plain=True
        )
        server.wait_ready()
        clients = Clients(server.url, 3)
        clients.wait_started()
        children = server.child_pids()
        assert len(children) >= 2
        server.signal(signal.SIGKILL)
        clients.join()
        took_s = until(lambda: not any(map(alive, children)), 30, "an orphan is left")  # noqa: B023
        gone.append(took_s)
        server.wait_exit()
    assert min(gone) < 2.0


def test_who_starts_a_killed_front_again_needs_not_wait() -> None:
    port = free_port()
    args = ("--model-path", str(tiny_model("qwen3")), "--port", str(port))
    server = ServerProcess(*args, plain=True).wait_ready()
    clients = Clients(server.url, 3)
    clients.wait_started()
    children = server.child_pids()
    server.signal(signal.SIGKILL)
    # What a supervisor does: its children may be there still, and so may its connections.
    with ServerProcess(*args) as again:
        again.wait_ready()
        clients.join()
        answer = again.client.post("/generate", json={"text": "The", "sampling_params": {"n": 2}})
        assert answer.status_code == 200
        assert not any(map(alive, children))
    server.wait_exit()


def test_a_front_killed_while_loading_leaves_nothing() -> None:
    gone = []
    for _ in range(ROUNDS):
        server = ServerProcess("--model-path", str(tiny_model("qwen3")), plain=True)
        server.wait_for_line("Starting the worker")
        until(lambda: len(server.child_pids()) >= 2, 30, "no children")  # noqa: B023
        children = server.child_pids()
        server.signal(signal.SIGKILL)
        took_s = until(lambda: not any(map(alive, children)), 30, "an orphan is left")  # noqa: B023
        gone.append(took_s)
        server.wait_exit()
    assert min(gone) < 3.0
