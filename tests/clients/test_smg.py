"""`smg` 1.13.0 before two servers, of which one is killed and one drained."""

from __future__ import annotations

import sys

from tests.clients.scenarios import need, succeed

need("smg", "smg")


def test_one_is_killed_and_one_drained() -> None:
    command = [sys.executable, "-m", "benchmarks.routers", "--router", "smg"]
    succeed([*command, "--requests", "80"])
