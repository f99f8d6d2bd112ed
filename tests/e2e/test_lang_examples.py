"""The programs of `examples/lang/`, started as a reader would, against one demo server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server import ServerProcess, demo_server

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {path.name: path for path in sorted((ROOT / "examples" / "lang").glob("*.py"))}
ARGUMENTS = {"streaming_chat.py": ["What is the capital of France?", "And of Japan?"]}
PRINTED = {
    "agent.py": ["calculator(23 + 19) = 42", "It says 42."],
    "json_extraction.py": ["Country: Tokyo is the capital of Japan"],
    "judge.py": ["Tokyo: Yes (", "Rome: No ("],
    "self_consistency.py": ["Answer: 42"],
    "streaming_chat.py": ["The capital of France is Paris.", "The capital of Japan is Tokyo."],
    "tree_of_thoughts.py": ["Step 2", "Answer: The capital of Japan is Tokyo."],
}


@pytest.fixture(scope="module")
def server() -> ServerProcess:
    return demo_server()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_program(server: ServerProcess, name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS[name]), "--url", server.url, *ARGUMENTS.get(name, [])],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for wanted in PRINTED[name]:
        assert wanted in done.stdout
    assert not done.stderr


def test_the_tutorials_blocks_run_in_order(server: ServerProcess) -> None:
    page = (ROOT / "docs" / "lang.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    code = "\n".join(blocks).replace("http://127.0.0.1:30000", server.url)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for wanted in ("The capital of France is Paris.", "\nTokyo\n", "calculator [", "2 + 2 = 4."):
        assert wanted in done.stdout
