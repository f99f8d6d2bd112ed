"""Folders whose files block their reader: refused at once, while chat and shutdown still work."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.support.server import ServerProcess
from tests.support.tiny_models import copy_of, tiny_model


def test_pipes_in_place_of_weights_keep_nobody(tmp_path: Path) -> None:
    folder = copy_of("qwen3", tmp_path / "pipe")
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    os.mkfifo(folder / "model.safetensors")
    with ServerProcess("--model-path", str(tiny_model("qwen3"))) as server:
        server.wait_ready()

        def load(_: int) -> httpx.Response:
            body = {"model_path": str(folder)}
            return httpx.post(f"{server.url}/update_weights_from_disk", json=body, timeout=30)

        with ThreadPoolExecutor(12) as clients:
            for answer in clients.map(load, range(12)):
                assert answer.status_code == 400
                assert "model.safetensors is a named pipe" in answer.json()["message"]
        chat = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        answer = server.client.post("/v1/chat/completions", json=chat, timeout=30)
        assert answer.status_code == 200, answer.text
        started = time.monotonic()
        server.signal()
        assert server.wait_exit(30) == 0
        assert time.monotonic() - started < 20
