"""Requests to the native API of a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.server import ServerProcess
from tests.support.waiting import until

GREEDY = {"temperature": 0, "ignore_eos": True}
TEXT = "The miller opens the gate, the wheel turns, and the stones grind wheat, barley and oats."


def generate(server: ServerProcess, **body: Any) -> Any:
    """Return the answer to a valid request to `/generate`."""
    response = server.client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(server: ServerProcess, **body: Any) -> str:
    """Return the message of a 400 from `/generate`; afterwards the server must be healthy."""
    response = server.client.post("/generate", json=body)
    assert response.status_code == 400, response.text
    assert server.client.get("/health").status_code == 200
    content = response.json()
    message: str = content["error"]["message"] if "error" in content else content["message"]
    return message


def stream(server: ServerProcess, **body: Any) -> list[dict[str, Any]]:
    """Return all events of a stream of `/generate`, without the end mark."""
    with server.client.stream("POST", "/generate", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def tokenize(server: ServerProcess, text: str) -> list[int]:
    """Return the token ids of a text."""
    tokens: list[int] = server.client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return tokens


def load(server: ServerProcess) -> dict[str, Any]:
    """Return what `/v1/loads` reports about the only replica."""
    found: dict[str, Any] = server.client.get("/v1/loads").json()["loads"][0]
    return found


def queues(server: ServerProcess) -> dict[str, Any]:
    """Return the number of requests that wait at each stage before they run."""
    found: dict[str, Any] = server.client.get("/v1/loads?include=queues").json()["loads"][0]
    return dict(found["queues"])


def until_running(server: ServerProcess, num: int = 1) -> None:
    """Wait until `num` requests run. Use `slowed`, or they may end before this looks."""
    until(lambda: load(server)["num_running_reqs"] >= num)


@contextmanager
def slowed(server: ServerProcess, step_s: float = 0.05) -> Iterator[None]:
    """Make each step slow, so that requests are still running even on a busy machine."""
    body = {"forward_sleep_time": step_s}
    server.client.post("/slow_down", json=body).raise_for_status()
    try:
        yield
    finally:
        server.client.post("/slow_down", json={}).raise_for_status()


def until_idle(server: ServerProcess) -> None:
    """Wait until no request runs, waits or has pages."""
    until(lambda: not any(load(server)[key] for key in ("num_total_reqs", "num_used_tokens")))


def run_example(name: str, server: ServerProcess, folder: str = "native_api") -> str:
    """Run a script of a folder in `examples` against `server`, and return its output."""
    path = Path(__file__).resolve().parents[2] / "examples" / folder / name
    done = subprocess.run(
        [sys.executable, str(path), "--url", server.url],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
