"""Speed and memory in the terminal when the server is ready."""

from __future__ import annotations

import os

import pytest

from runtime.ipc.messages import WorkerReady
from runtime.processes.resident import resident_bytes
from server.banner import expected

GIB = 2**30


def worker(device: str) -> WorkerReady:
    return WorkerReady(
        max_total_num_tokens=4096,
        max_running_requests=8,
        page_size=16,
        dtype="float32",
        device=device,
        attention_backend="cpu",
        weight_bytes=GIB,
        kv_bytes=2 * GIB,
        load_seconds=1.0,
        pid=1,
    )


@pytest.mark.parametrize(("speed", "said"), [(24.6, "about 25 tokens/s"), (2.84, "about 2.8 tok")])
def test_a_cpu_says_what_to_expect(speed: float, said: str) -> None:
    (line,) = expected(worker("cpu"), speed, GIB // 2)
    assert said in line
    assert line.endswith("memory 0.5 GiB, up to 2.5 GiB as the KV pool fills")


@pytest.mark.parametrize(("device", "speed"), [("cuda", 100.0), ("cpu", None)])
def test_nothing_is_said_that_was_not_measured(device: str, speed: float | None) -> None:
    assert not expected(worker(device), speed, GIB)


def test_memory_is_that_of_processes_that_live() -> None:
    mine = resident_bytes([os.getpid()])
    assert 2**24 < mine < 2**36
    assert resident_bytes([2**30]) == 0
