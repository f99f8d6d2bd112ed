"""The front imports neither torch nor transformers: start-up and memory depend on it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "numpy", "triton", "httpx")

FRONT = ("server.front", "server.serving", "server.app", "server.metrics", "server.protocol")


@pytest.mark.parametrize(
    "module", [*FRONT, "openai_api.routes", "runtime.processes.engine_processes"]
)
def test_heavy_libraries_stay_out(module):
    code = f"import sys, {module}\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    output = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == "[]"


def test_the_worker_is_started_before_the_web_framework_is_imported() -> None:
    code = "import sys, server.front\nprint('fastapi' in sys.modules, 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
