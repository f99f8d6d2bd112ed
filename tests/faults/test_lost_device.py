"""A device that has failed ends its worker, which is replaced; `tests/gpu` has the real one."""

from __future__ import annotations

from pathlib import Path

from tests.support.lost_device_server import LostDeviceServer
from tests.support.tiny_models import tiny_model


def test_the_worker_ends_and_is_replaced(tmp_path: Path) -> None:
    losing = LostDeviceServer(tmp_path, "--model-path", str(tiny_model("qwen3")))
    with losing.server.wait_ready():
        # A busy machine may be slow, hardly every time.
        assert any(losing.lose("raise") < 2.0 for _ in range(3))
        assert losing.server.client.get("/server_info").json()["num_restarts"] >= 1
        last = [line for line in losing.server.lines if "The device has failed" in line]
        assert last[0].endswith("RuntimeError: CUDA error: device-side assert triggered")
