"""A server that was started and stopped leaves its port free and no file behind.

HEADRACE_FAULT_ROUNDS=20 gives the long form.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.faults.test_kill import ROUNDS
from tests.support.processes import alive
from tests.support.server import ServerProcess, free_port
from tests.support.tiny_models import tiny_model


def test_nothing_is_left() -> None:
    port = str(free_port())
    args = ("--model-path", str(tiny_model("qwen3")), "--port", port)
    # A short name: paths of sockets are.
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            with ServerProcess(*args, TMPDIR=folder) as server:
                server.wait_ready()
                body = {"text": "The", "sampling_params": {"max_new_tokens": 4}}
                assert server.client.post("/generate", json=body).status_code == 200
                left = server.child_pids()
                server.signal()
                assert server.wait_exit() == 0
            assert not any(map(alive, left))
            assert list(Path(folder).iterdir()) == []
