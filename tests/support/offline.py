"""What tests of the offline engine share: the demo model, prompts, waiting, scripts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import headrace as sgl
from headrace.demo import MODEL_PATH
from runtime.ipc.messages import SlowDown

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(MODEL_PATH)
# Grammars are off, because importing their library takes a third of a start's CPU time.
PLAIN = {"model_path": MODEL, "grammar_backend": "none"}
FRANCE = "The capital of France is"
JAPAN = "The capital of Japan is"
SHORT = {"temperature": 0, "max_new_tokens": 8}
LONG = {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True}


def is_idle(engine: sgl.Engine) -> bool:
    """Whether neither the client nor the worker has a request."""
    context = engine.context
    return context.client.num_in_flight == 0 and not context.status.total("num_running_reqs")


def slow_down(engine: sgl.Engine, step_s: float = 0.05) -> None:
    """Make each step slow, so that requests are still running even on a busy machine."""
    told = engine.context.client.calls.control(lambda call_id: SlowDown(call_id, step_s))
    assert engine._core.call(told).success


@contextmanager
def slowed(engine: sgl.Engine, step_s: float = 0.05) -> Iterator[None]:
    """Apply `slow_down` within a `with` block."""
    slow_down(engine, step_s)
    try:
        yield
    finally:
        slow_down(engine, 0.0)


def run_script(code: str, *, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run Python code in a separate interpreter, outside the checkout."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "MODEL": MODEL},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
