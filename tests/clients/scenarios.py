"""The questions that every client asks, and the demo model's answers."""

from __future__ import annotations

import os
import subprocess
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

# Any name is answered by the model that is served.
MODEL = "demo-toy"
CAPITAL = "What is the capital of France?"
WEATHER = "What is the weather in Oslo?"
SUM = "What is 7 + 8? Answer as JSON."
# A tool's answer in a form that the model has learnt to report.
OUTLOOK = '{"temperature": 12, "unit": "celsius", "condition": "sunny"}'
INSTRUCTIONS = "You are a helpful assistant."


class Weather(BaseModel):
    """Get the current weather of a city"""

    city: str


class Total(BaseModel):
    """The sum of two numbers"""

    total: int = Field(ge=0, le=99)


class Place(BaseModel):
    """The model would answer Paris by itself, so that only a schema gives what is here."""

    city: Literal["Oslo", "Quito"]


def need(package: str, client: str) -> Any:
    """Import `package`, or skip with the command that installs it."""
    requirements = f"tests/clients/requirements/{client}.txt"
    command = f"make test-clients ARGS={client}, or python -m pip install -r {requirements}"
    return pytest.importorskip(package, reason=command)


def succeed(command: list[str], **variables: str) -> None:
    """Run a benchmark offline, with more environment variables; show its output if it fails."""
    offline = os.environ | {"HF_HUB_OFFLINE": "1", **variables}
    done = subprocess.run(
        command, env=offline, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
