"""Every command of the README and the quick start, run as it stands there.

Only the port, the interpreter's folder and the path of a user's own model are changed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.guard import unwatch, watch
from tests.support.server import READY_LINE, free_port
from tests.support.tiny_models import tiny_model

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/quickstart.md")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# It answers all of them; the fetched model has no tools and no thoughts (see tests/real).
TOY = 'make serve ARGS="--model-path demo-toy"'
OWN = "--model-path /path/to/"


def blocks(language: str) -> list[tuple[str, str]]:
    """Page and text of every block in `language`."""
    return [
        (page, text)
        for page in PAGES
        for kind, text in BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
        if kind == language
    ]


COMMANDS = list(dict.fromkeys(text.strip() for _, text in blocks("bash")))
CURLS = [text for text in COMMANDS if text.startswith("curl ")]
SCRIPTS = [text for _, text in blocks("python")]
# What an answer must hold, by a piece of the question.
ANSWERS = {
    "capital of Japan?": "The capital of Japan is Tokyo.",
    "List 3 countries": "1. ",
    "What is 2 * 2?": "2 * 2 = 4.",
    "What is 7 + 8?": '"reasoning_content":"',
    "weather in Oslo": '"name":"get_weather"',
    "The capital of France is": "Paris",
}


def shell(command: str, port: int, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command of a page against the server on `port`."""
    return subprocess.run(
        ["bash", "-c", here(command).replace("30000", str(port))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        **options,  # type: ignore[call-overload]
    )


def here(command: str) -> str:
    """With this interpreter's environment, which is installed already, in the place of .venv."""
    folder = Path(sys.executable).parent
    return command.replace("make ", f"make --old-file=install BIN={folder} ").replace(
        ".venv/bin/", f"{folder}/"
    )


def make_serve(command: str) -> subprocess.Popen[str]:
    """Start a server by a command of a page and wait until it is ready."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {here(command)}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    watch(-process.pid)
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if READY_LINE in line:
            return process
    raise AssertionError("".join(seen))


def interrupt(process: subprocess.Popen[str]) -> int:
    """Ctrl-C in the terminal: the signal goes to make and to the server."""
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout is not None
    process.stdout.read()
    code = process.wait(20)
    unwatch(-process.pid)
    return code


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    chosen = free_port()
    assert {"make serve", TOY} <= set(COMMANDS)
    process = make_serve(TOY.replace('ARGS="', f'ARGS="--port {chosen} '))
    yield chosen
    interrupt(process)


@pytest.mark.parametrize("command", CURLS, ids=range(len(CURLS)))
def test_a_curl_is_answered(command: str, port: int) -> None:
    output = shell(command, port).stdout
    if '"stream": true' in command:
        # However its pieces came: on a busy machine several at once.
        assert output.count("data: ") > 2
        output = "".join(re.findall(r'"delta":{[^}]*"content":"([^"]*)"', output))
    wanted = [text for question, text in ANSWERS.items() if question in command]
    assert wanted, "say in ANSWERS what this command must print"
    assert wanted[0] in output


@pytest.mark.parametrize("script", SCRIPTS, ids=range(len(SCRIPTS)))
def test_a_script_runs(script: str, port: int) -> None:
    code = script.replace("30000", str(port))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert {"2 * 2": "4", "Japan": "Tokyo"}["Japan" if "Japan" in code else "2 * 2"] in done.stdout


def test_chat_and_help(port: int) -> None:
    assert "make chat" in COMMANDS
    chat = f'make chat ARGS="--url http://127.0.0.1:{port} --temperature 0"'
    assert "Paris" in shell(chat, port, input="What is the capital of France?\n").stdout
    (help_command,) = [text for text in COMMANDS if text.endswith("--help")]
    assert "--model-path" in shell(help_command, port).stdout


def test_a_model_of_your_own_is_served_until_ctrl_c() -> None:
    (command,) = [text for text in COMMANDS if OWN in text]
    path, own_port = re.search(r"--model-path (\S+) --port (\d+)", command).groups()  # type: ignore[union-attr]
    chosen = str(free_port())
    process = make_serve(command.replace(path, str(tiny_model("qwen2"))).replace(own_port, chosen))
    assert httpx.get(f"http://127.0.0.1:{chosen}/health").status_code == 200
    interrupt(process)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{chosen}/health")


def test_no_command_is_left_out() -> None:
    run_above = {"make serve", TOY, "make chat", *CURLS}
    left = [c for c in COMMANDS if c not in run_above and OWN not in c]
    # CI itself is a `make test`.
    assert left == ["make test", ".venv/bin/python -m server.launch --help"]
