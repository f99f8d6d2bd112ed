"""A GPU whose context breaks under load: the worker ends at once, and a new one serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.lost_device_server import LostDeviceServer
from tests.support.tiny_models import tiny_model


@pytest.mark.parametrize("kind", ["assert", "access"])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_worker_ends_and_is_replaced(tmp_path: Path, kind: str, overlap: bool) -> None:
    options = () if overlap else ("--disable-overlap-schedule",)
    losing = LostDeviceServer(
        tmp_path, "--model-path", str(tiny_model("llama")), "--device", "cuda", *options
    )
    with losing.server.wait_ready(180):
        assert losing.lose(kind) < 2.0
        # A second time: the new worker is watched as the first was.
        assert losing.lose(kind) < 2.0
