"""A server on a GPU that is killed while it captures graphs, or stopped again and again.

HEADRACE_FAULT_ROUNDS=50 gives the long form.
"""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

import httpx
import pytest
import torch

from tests.faults.test_kill import ROUNDS
from tests.support.gpu import DEVICE
from tests.support.processes import alive
from tests.support.server import ServerProcess, free_port
from tests.support.tiny_models import tiny_model
from tests.support.waiting import until

pytestmark = pytest.mark.also_cpu(asked=True)

# Contexts of other processes come and go by less.
SLACK_BYTES = 64 * 2**20
OPTIONS = (
    *("--device", DEVICE),
    *("--max-total-tokens", "200000" if DEVICE == "cuda" else "8192"),
    *("--max-running-requests", "64"),
)


def new_server(*options: str, **environment: str) -> ServerProcess:
    return ServerProcess(
        "--model-path", str(tiny_model("llama")), *OPTIONS, *options, **environment
    )


def free_bytes() -> int:
    """What the device has left, for all processes together; nothing is counted on a CPU."""
    return torch.cuda.mem_get_info()[0] if DEVICE == "cuda" else 0


def is_capturing(server: ServerProcess) -> bool:
    """Whether it is in the midst of its graphs; on a CPU, which has none, of its warm-up."""
    try:
        told = server.client.get("/startupz").json()
    except httpx.TransportError:
        return False
    if DEVICE == "cpu":
        return bool(told["phase"] == "warming_up")
    return told["detail"] == "CUDA graphs" and 0 < told["progress"] < 1


@pytest.mark.timeout(600)
def test_a_front_killed_while_graphs_are_captured_leaves_nothing() -> None:
    before, gone = free_bytes(), []
    for _ in range(ROUNDS):
        server = new_server()
        until(lambda: is_capturing(server), 120, "no graph is captured")  # noqa: B023
        children = server.child_pids()
        assert children
        server.signal(signal.SIGKILL)
        gone.append(until(lambda: not any(map(alive, children)), 60, "an orphan is left"))  # noqa: B023
        server.wait_exit()
        until(lambda: free_bytes() > before - SLACK_BYTES - 1, 30, "memory is kept")
    assert min(gone) < 5.0


@pytest.mark.timeout(1200)
def test_starts_and_stops_leave_no_process_file_or_memory() -> None:
    before, port = free_bytes(), str(free_port())
    # A short name: paths of sockets are.
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            with new_server("--port", port, TMPDIR=folder) as server:
                server.wait_ready(180)
                body = {"text": "The", "sampling_params": {"max_new_tokens": 4}}
                assert server.client.post("/generate", json=body).status_code == 200
                left = server.child_pids()
                server.signal()
                assert server.wait_exit() == 0
            assert not any(map(alive, left))
            until(lambda: free_bytes() > before - SLACK_BYTES - 1, 30, "memory is kept")
            kept = [path.name for path in Path(folder).iterdir()]
            # Kernels that were compiled are for the next start.
            assert [name for name in kept if "torchinductor" not in name] == []
