"""`sglang-router` 0.3.2 before two servers, of which one is killed and comes back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.clients.scenarios import CAPITAL, MODEL, need, succeed
from tests.support.server import ServerProcess, free_port
from tests.support.waiting import until

need("sglang_router", "sglang_router")
CHAT = {"model": MODEL, "temperature": 0, "messages": [{"role": "user", "content": CAPITAL}]}


@pytest.fixture(scope="module")
def workers() -> Iterator[list[ServerProcess]]:
    started = [ServerProcess(), ServerProcess()]
    try:
        for worker in started:
            worker.wait_ready()
        yield started
    finally:
        for worker in started:
            worker.stop()


@pytest.fixture(scope="module")
def router(workers: list[ServerProcess]) -> Iterator[httpx.Client]:
    port = free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--port", str(port)]
    command += ["--worker-urls", *(worker.url for worker in workers), "--policy", "round_robin"]
    command += ["--health-check-interval-secs", "1", "--health-failure-threshold", "2"]
    command += ["--health-success-threshold", "1", "--cb-timeout-duration-secs", "2"]
    command += ["--prometheus-port", str(free_port()), "--host", "127.0.0.1"]
    process = subprocess.Popen(command, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            until(lambda: healthy(client) == 2, timeout_s=60)
            yield client
    finally:
        process.terminate()
        process.wait(30)


def healthy(client: httpx.Client) -> int:
    """How many workers the router sends requests to."""
    try:
        answer = client.get("/workers")
    except httpx.TransportError:
        return 0
    return sum(worker["is_healthy"] for worker in answer.json()["workers"])


def answers(router: httpx.Client, count: int) -> list[str]:
    """The texts of `count` requests, four at a time; each must be answered."""

    def ask(number: int) -> str:
        if number % 2:
            return router.post("/v1/chat/completions", json=CHAT).raise_for_status().text
        greedy = {"temperature": 0, "max_new_tokens": 8}
        body = {"text": "The capital of France is", "sampling_params": greedy}
        return router.post("/generate", json=body).raise_for_status().text

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(ask, range(count)))


def served(worker: ServerProcess) -> int:
    return sum("POST /" in line and " 200 " in line for line in worker.lines)


def test_both_serve(router: httpx.Client, workers: list[ServerProcess]) -> None:
    before = [served(worker) for worker in workers]
    assert all("Paris" in text for text in answers(router, 8))
    for worker, count in zip(workers, before, strict=True):
        until(lambda worker=worker, count=count: served(worker) > count)
    with router.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as stream:
        assert "data: [DONE]" in stream.read().decode()
    assert router.get("/v1/models").json()["data"]


def test_a_mistake_passes_through(router: httpx.Client) -> None:
    refused = router.post("/v1/chat/completions", json={**CHAT, "temperature": -1})
    assert refused.status_code == 400
    assert "temperature" in refused.text


def test_one_is_killed_and_comes_back(router: httpx.Client, workers: list[ServerProcess]) -> None:
    second = workers[1]
    # Whoever is sent to it is sent on to the other.
    with ThreadPoolExecutor(1) as pool:
        running: Any = pool.submit(answers, router, 40)
        second.process.kill()
        assert all("Paris" in text for text in running.result())
    second.wait_exit()
    assert all("Paris" in text for text in answers(router, 8))
    until(lambda: healthy(router) == 1, timeout_s=60)
    workers[1] = again = ServerProcess("--port", str(second.port)).wait_ready()
    until(lambda: healthy(router) == 2, timeout_s=60)
    before = served(again)

    def is_used() -> bool:
        assert all("Paris" in text for text in answers(router, 4))
        return served(again) > before

    until(is_used, timeout_s=60)


def test_one_is_killed_and_one_drained() -> None:
    command = [sys.executable, "-m", "benchmarks.routers", "--router", "sglang-router"]
    succeed([*command, "--requests", "80"])
