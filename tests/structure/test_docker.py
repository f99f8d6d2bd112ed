"""Checks of the Dockerfile that need no build."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.launch.command_line import parse_args

ROOT = Path(__file__).resolve().parents[2]


def instructions() -> list[tuple[str, str]]:
    """Every instruction with what it says, continued lines joined, comments left out."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    pairs = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(name, rest) for name, rest in pairs]


def values(name: str) -> list[str]:
    return [rest for each, rest in instructions() if each == name]


def last_stage() -> list[tuple[str, str]]:
    found = instructions()
    starts = [index for index, (name, _) in enumerate(found) if name == "FROM"]
    return found[starts[-1] :]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_everything_that_is_installed_is_copied() -> None:
    copied = {source for rest in values("COPY") for source in rest.split()[:-1]}
    copied = {source for source in copied if not source.startswith("--from")}
    copied.discard("/opt/headrace")
    include = project()["tool"]["setuptools"]["packages"]["find"]["include"]
    assert copied >= {pattern.removesuffix("*") for pattern in include}
    assert copied >= {"pyproject.toml", *project()["project"]["license-files"]}
    ignored = (ROOT / ".dockerignore").read_text().split()
    for source in copied:
        assert (ROOT / source).exists(), source
        assert source not in ignored


def test_torch_is_the_build_for_cpus_unless_another_is_asked_for() -> None:
    assert "TORCH_BACKEND=cpu" in values("ARG")
    (build,) = (rest for rest in values("RUN") if "/opt/headrace" in rest)
    installs = re.findall(r"(?:uv )?pip install [^&;]*", build)
    # pip's index has torch for CUDA: nothing that needs it is installed by pip itself.
    (by_pip,) = (each for each in installs if not each.startswith("uv "))
    assert re.fullmatch(r"uv==[\d.]+", by_pip.split()[-1])
    (ours,) = (each for each in installs if each.startswith("uv "))
    assert build.index("export UV_TORCH_BACKEND=") < build.index(ours)
    assert "nvidia*" in build.partition(ours)[2]
    # Its other extras bring the same libraries along.
    assert ours.rstrip(" \\\n").endswith(' ".[otel]"')


def test_structured_output_comes_with_the_package() -> None:
    needed = project()["project"]["dependencies"]
    assert [each for each in needed if re.match(r"llguidance\b", each)]
    assert not [each for each in needed if re.match("triton|xgrammar|flashinfer", each)]


def test_every_version_is_an_exact_one() -> None:
    images = dict(rest.split("=", 1) for rest in values("ARG"))
    for rest in values("FROM"):
        name = re.sub(r"\$\{(\w+)\}", lambda found: images[found[1]], rest.split()[0])
        assert re.fullmatch(r"python:3\.12\.\d+-slim-[a-z]+(@sha256:[0-9a-f]{64})?", name)
    (build,) = (rest for rest in values("RUN") if "/opt/headrace" in rest)
    assert "--constraints docker/constraints.txt" in build
    lines = (ROOT / "docker" / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", pin) for pin in pins)
    pinned = {pin.split("==")[0] for pin in pins}
    for needed in project()["project"]["dependencies"]:
        assert re.split(r"[<>=; ]", needed)[0] in pinned, needed
    # What makes the wheel, too.
    assert "setuptools" in pinned


def test_the_documented_commands_start_a_server() -> None:
    text = (ROOT / "docs" / "container.md").read_text().replace("\\\n", " ")
    text += (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n#", " ")
    commands = re.findall(r"docker run [^\n]*", text)
    assert len(commands) >= 4
    for command in commands:
        assert "-e HEADRACE_API_KEY" in command


def test_the_server_is_not_root() -> None:
    users = [rest for name, rest in last_stage() if name == "USER"]
    assert users == ["10001:10001"]
    names = [name for name, _ in last_stage()]
    # What needs root comes before; nothing is copied or run as the server's user.
    assert names.index("USER") > max(index for index, name in enumerate(names) if name == "RUN")


def test_the_entry_point_is_a_command_line_of_ours() -> None:
    (entry,) = values("ENTRYPOINT")
    python, dash_m, module, *options = json.loads(entry)
    assert (python, dash_m, module) == ("python", "-m", "server.launch")
    config = parse_args(options, {}).config
    assert values("EXPOSE") == [str(config.http.port)]
    environment = dict(pair.split("=", 1) for rest in values("ENV") for pair in rest.split())
    assert environment["HEALTH_URL"] == f"http://127.0.0.1:{config.http.port}/health"


@pytest.fixture
def health() -> Iterator[list[int]]:
    """The status that a server answers to come, and its port behind it."""
    status = [200]

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status[0] if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        status.append(server.server_port)
        yield status
        server.shutdown()


def test_the_health_check_follows_the_servers_health(health: list[int]) -> None:
    (check,) = values("HEALTHCHECK")
    options, _, command = check.partition(" CMD ")
    assert dict(option.split("=") for option in options.split()).keys() == {
        *("--interval", "--timeout", "--start-period", "--retries")
    }
    python, *arguments = json.loads(command)
    assert python == "python"

    def is_healthy(port: int) -> bool:
        environment = {
            **os.environ,
            "HEALTH_URL": f"http://127.0.0.1:{port}/health",
            # A proxy of the environment cannot see the container's own ports.
            "http_proxy": "http://127.0.0.1:9",
        }
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            capture_output=True,
            check=False,
            timeout=30,
        )
        return done.returncode == 0

    _, port = health
    assert is_healthy(port)
    health[0] = 503
    assert not is_healthy(port)
    assert not is_healthy(9)
