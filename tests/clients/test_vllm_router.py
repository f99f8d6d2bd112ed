"""`vllm-router` 0.1.17 before two servers, of which one is killed and one drained."""

from __future__ import annotations

import sys

from tests.clients.scenarios import need, succeed

need("vllm_router", "vllm_router")


def test_one_is_killed_and_one_drained() -> None:
    command = [sys.executable, "-m", "benchmarks.routers", "--router", "vllm-router"]
    succeed([*command, "--requests", "80"])
