"""Agents on every API: the demo model calls the weather tool, reads the result and answers."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import ROOT, ServerProcess, demo_server

EXAMPLE = ROOT / "examples" / "agents" / "weather_agent.py"
AGENT = runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module")
def server() -> ServerProcess:
    return demo_server()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", AGENT["APIS"])
def test_it_calls_and_answers(server: ServerProcess, api: str, stream: bool) -> None:
    asked: list[str] = []
    real = AGENT["get_weather"]

    def get_weather(city: str) -> str:
        asked.append(city)
        return str(real(city))

    loop = AGENT["APIS"][api]
    loop.__globals__["get_weather"] = get_weather
    try:
        answer = loop(server.url, stream=stream)
    finally:
        loop.__globals__["get_weather"] = real
    assert asked == ["Paris"]
    assert "18" in answer
    assert "sunny" in answer


def test_all_say_the_same(server: ServerProcess) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--url", server.url, "--stream"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    answers = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert answers.keys() == {"chat", "responses", "messages"}
    assert len({*answers.values()}) == 1


def explained(server: ServerProcess, file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.cli", "explain", str(file), "--url", server.url]
    return subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_broken_prefix_is_explained(server: ServerProcess, tmp_path: Path) -> None:
    def body(minute: int) -> dict[str, Any]:
        rules = "Answer in one word. " * 10
        system = f"{rules}It is 12:{minute:02}. {rules}"
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hello"}]
        return {"messages": messages, "max_tokens": 1}

    server.client.post("/v1/chat/completions", json=body(1)).raise_for_status()
    file = tmp_path / "request.json"
    file.write_text(json.dumps(body(59)))
    found = explained(server, file)
    assert found.returncode == 0, found.stderr
    lines = dict(line.split(maxsplit=1) for line in found.stdout.splitlines())
    assert "the cached prompt has another token" in lines["break"]
    assert lines["before"].endswith('It is 12:"')
    assert lines["after"].startswith('"59. Answer')
    file.write_text(json.dumps(body(1)))
    assert "The whole prompt is cached." in explained(server, file).stdout
    file.write_text(json.dumps({"messages": []}))
    refused = explained(server, file)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "messages cannot be empty" in refused.stderr
    file.write_text("no JSON")
    assert explained(server, file).returncode == 2
