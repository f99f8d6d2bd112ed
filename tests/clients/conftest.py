"""The server for all clients: the demo model, started without options."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.support.server import ServerProcess


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """Where `python -m tests.clients` started a server, else a new one's address."""
    if given := os.environ.get("HEADRACE_CLIENTS_URL"):
        yield given
        return
    with ServerProcess() as server:
        yield server.wait_ready().url


@pytest.fixture(scope="session")
def openai_url(url: str) -> str:
    """What clients of the OpenAI API call their base URL."""
    return f"{url}/v1"
