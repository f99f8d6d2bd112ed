"""Questions to `/generate` of a real server, as tests of the native API ask them."""

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
    """The answer to a request that is served."""
    response = server.client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(server: ServerProcess, **body: Any) -> str:
    """The message of a 400; the server must be well after it."""
    response = server.client.post("/generate", json=body)
    assert response.status_code == 400, response.text
    assert server.client.get("/health").status_code == 200
    content = response.json()
    message: str = content["error"]["message"] if "error" in content else content["message"]
    return message


def stream(server: ServerProcess, **body: Any) -> list[dict[str, Any]]:
    """Every event of a stream but for the end mark."""
    with server.client.stream("POST", "/generate", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def tokenize(server: ServerProcess, text: str) -> list[int]:
    """Token ids of a text."""
    tokens: list[int] = server.client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return tokens


def load(server: ServerProcess) -> dict[str, Any]:
    """What `/v1/loads` says of the one replica."""
    found: dict[str, Any] = server.client.get("/v1/loads").json()["loads"][0]
    return found


def queues(server: ServerProcess) -> dict[str, Any]:
    """How many requests wait at each place before they run."""
    found: dict[str, Any] = server.client.get("/v1/loads?include=queues").json()["loads"][0]
    return dict(found["queues"])


def until_running(server: ServerProcess, num: int = 1) -> None:
    """Wait until so many requests run; only inside `slowed` are they sure to run still."""
    until(lambda: load(server)["num_running_reqs"] >= num)


@contextmanager
def slowed(server: ServerProcess, step_s: float = 0.05) -> Iterator[None]:
    """Have each step take so long that a request is met while it runs, however busy we are."""
    body = {"forward_sleep_time": step_s}
    server.client.post("/slow_down", json=body).raise_for_status()
    try:
        yield
    finally:
        server.client.post("/slow_down", json={}).raise_for_status()


def until_idle(server: ServerProcess) -> None:
    """Wait until nothing runs, waits or holds pages."""
    until(lambda: not any(load(server)[key] for key in ("num_total_reqs", "num_used_tokens")))


def run_example(name: str, server: ServerProcess, folder: str = "native_api") -> str:
    """What a script of a folder of `examples` prints, run beside `server`."""
    path = Path(__file__).resolve().parents[2] / "examples" / folder / name
    done = subprocess.run(
        [sys.executable, str(path), "--url", server.url],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
