"""What tests of the offline engine share: the demo model, questions, waiting, scripts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import headrace as sgl
from headrace.demo import MODEL_PATH

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(MODEL_PATH)
# Nothing about grammars: their library is a third of the work of a start.
PLAIN = {"model_path": MODEL, "grammar_backend": "none"}
FRANCE = "The capital of France is"
JAPAN = "The capital of Japan is"
SHORT = {"temperature": 0, "max_new_tokens": 8}
LONG = {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True}


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)


def is_idle(engine: sgl.Engine) -> bool:
    """Whether neither the client nor the worker has a request."""
    context = engine.context
    return context.client.num_in_flight == 0 and not context.status.total("num_running_reqs")


def run_script(code: str, *, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run `code` in an interpreter of its own, outside the checkout."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "MODEL": MODEL},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
