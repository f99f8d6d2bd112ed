"""Schemathesis: good and bad bodies made from the OpenAPI document, beside other requests.

The test starts its own server. Routes that would change it need a key that Schemathesis does not
get.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.server import ServerProcess
from tests.support.tiny_models import tiny_model

NUM_EXAMPLES = 300
NUM_STREAMS = 4
# 46 minutes on two quiet cores; the suite's own limit for a test is five.
LIMIT_S = 5300
# Not the events of streams: it takes their names for a part of what the document describes.
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(
        *("--model-path", str(tiny_model("qwen3")), "--admin-api-key", "untold"),
        *("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--enable-metrics"),
    ) as started:
        yield started.wait_ready()


@pytest.fixture
def load(server: ServerProcess) -> Iterator[list[int]]:
    """Streams that go on all the while; tokens of each that is over."""
    counts: list[int] = []
    over = threading.Event()

    async def stream(client: httpx.AsyncClient, index: int) -> None:
        body = {"prompt": [index] * 20, "max_tokens": 100, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        while not over.is_set():
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                lines = [line async for line in answer.aiter_lines() if line]
            # The last one says that it was.
            usage = json.loads(lines[-2].removeprefix("data: "))["usage"]
            counts.append(usage["completion_tokens"])

    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            await asyncio.gather(*(stream(client, index) for index in range(NUM_STREAMS)))

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    yield counts
    over.set()
    thread.join(120)
    assert not thread.is_alive()


@pytest.mark.timeout(LIMIT_S)
def test_no_body_breaks_the_server(server: ServerProcess, load: list[int], tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
        *("--checks", ",".join(CHECKS), "--max-examples", str(NUM_EXAMPLES), "--mode", "all"),
        *("--phases", "examples,coverage,fuzzing", "--workers", "8", "--continue-on-failure"),
        *("--suppress-health-check", "all", "--generation-database", "none"),
        *("--report", "json", "--report-json-path", str(tmp_path / "report.json")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    print(done.stdout[-3000:])
    report = json.loads((tmp_path / "report.json").read_text())
    # Its own generator may stumble on a busy machine, which is no failure of a test case.
    assert report["complete"]
    assert report["operations"]["tested"] == report["operations"]["total"]
    assert report["test_cases"]["generated"] > NUM_EXAMPLES
    assert not report["failures"], done.stdout[-20_000:]
    assert report["phases"]["fuzzing"]["status"] == "success"
    assert "Traceback" not in server.log
    # All the others got what they asked for.
    assert load
    assert set(load) == {100}
