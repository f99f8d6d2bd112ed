"""`kill -9` of one of two replicas: the other one's clients notice nothing, and it comes back.

Its own clients named it, so they wait for it.
"""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import orjson

from tests.faults.test_kill import is_ready, restarts
from tests.support.processes import alive, command
from tests.support.server import ServerProcess
from tests.support.tiny_models import tiny_model
from tests.support.waiting import until

NUM_TOKENS = 240


class Stream:
    """One stream on one replica, read in a thread to its end."""

    def __init__(self, url: str, rank: int) -> None:
        self.started = threading.Event()
        self.last = ""
        self._url = url
        self._body = {
            "text": f"The mill {rank}",
            "stream": True,
            "data_parallel_rank": rank,
            "sampling_params": {"max_new_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True},
        }
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with httpx.stream("POST", self._url + "/generate", json=self._body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.last = line
                    self.started.set()

    def result(self) -> dict:  # type: ignore[type-arg]
        self._thread.join(60)
        assert not self._thread.is_alive(), "a client hangs"
        return orjson.loads(self.last.removeprefix("data: "))


def workers(server: ServerProcess) -> dict[int, int]:
    """Process id of each replica's worker, told by the gauges that it maps."""
    found = {}
    for pid in server.child_pids():
        # The detokenizer maps them, too.
        if "scheduler" not in command(pid):
            continue
        maps = Path(f"/proc/{pid}/maps").read_text()
        for rank in range(2):
            if f"/replica-{rank}/state" in maps:
                found[rank] = pid
    return found


def answer(server: ServerProcess, rank: int) -> httpx.Response:
    body = {"text": "The", "sampling_params": {"max_new_tokens": 4}, "data_parallel_rank": rank}
    return server.client.post("/generate", json=body, timeout=30)


def post(server: ServerProcess, path: str, **body: object) -> None:
    server.client.post(path, json=body, timeout=30).raise_for_status()


def kill_one(server: ServerProcess, victim: int) -> None:
    before = workers(server)
    num_restarts = restarts(server)
    assert set(before) == {0, 1}
    # So slow that none has come to its end when the last one has begun.
    post(server, "/slow_down", forward_sleep_time=0.03)
    streams = {rank: [Stream(server.url, rank) for _ in range(2)] for rank in (0, 1)}
    for stream in (*streams[0], *streams[1]):
        assert stream.started.wait(60)
    os.kill(before[victim], signal.SIGKILL)
    assert is_ready(server), "one replica is enough to be ready"
    assert answer(server, victim).status_code in (200, 503)
    free = server.client.post("/generate", json={"text": "a"}, timeout=30).json()
    assert free["meta_info"]["finish_reason"]["type"] in ("stop", "length")
    for rank in (1 - victim, victim):
        for stream in streams[rank]:
            meta = stream.result()["meta_info"]
            assert meta["completion_tokens"] == NUM_TOKENS
            assert meta["dp_rank"] == rank
    until(lambda: answer(server, victim).status_code == 200, 90, "it never came back")
    post(server, "/slow_down")
    assert restarts(server) == num_restarts + 1
    after = workers(server)
    assert after[1 - victim] == before[1 - victim]
    assert after[victim] != before[victim]


def test_a_killed_replica_delays_only_its_own_requests() -> None:
    options = ("--dp-size", "2", "--num-threads", "1", "--skip-server-warmup")
    with ServerProcess("--model-path", str(tiny_model("qwen3")), *options) as server:
        server.wait_ready()
        for victim in (0, 1):
            kill_one(server, victim)
        left = server.child_pids()
        assert len(left) >= 4
        server.stop()
        until(lambda: not any(map(alive, left)), 5, "an orphan is left")


def test_replicas_never_differ_in_weights_or_memory() -> None:
    options = ("--dp-size", "2", "--num-threads", "1", "--skip-server-warmup")
    path = str(tiny_model("qwen3"))
    with ServerProcess("--model-path", path, *options) as server:
        server.wait_ready()
        before = workers(server)
        post(server, "/release_memory_occupation")
        # The worker that is started again has its memory: so must the other one.
        os.kill(before[0], signal.SIGKILL)
        for rank in (0, 1):
            until(lambda r=rank: answer(server, r).status_code == 200, 90, "not back")  # type: ignore[misc]
        after = workers(server)
        assert not set(after.values()) & set(before.values())
        # Half an update: one replica dies while both load.
        os.kill(after[0], signal.SIGSTOP)
        with ThreadPoolExecutor(8) as pool:
            body = {"model_path": path}
            url = server.url + "/update_weights_from_disk"
            update = pool.submit(httpx.post, url, json=body, timeout=60)
            # Nothing tells from outside that it has begun, but that newcomers are held back.
            while not server.client.get("/v1/loads").json()["loads"][1]["queues"]["paused"]:
                assert not update.done()
                wait([pool.submit(answer, server, 1)], timeout=0.2)
            os.kill(after[0], signal.SIGKILL)
            reply = update.result()
        assert (reply.status_code, reply.json()["success"]) == (400, False)
        for rank in (0, 1):
            until(lambda r=rank: answer(server, r).status_code == 200, 90, "not back")  # type: ignore[misc]
        assert not set(workers(server).values()) & set(after.values())
