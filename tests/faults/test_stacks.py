"""A stuck process is ended in time; before that, the log shows the stack of each thread."""

from __future__ import annotations

import os
import signal
import threading
import time

import httpx
import pytest

from tests.support.processes import children, command
from tests.support.server import ServerProcess
from tests.support.tiny_models import tiny_model

WATCHDOG_S = 2
BODY = {"text": "The mill", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}


def child(server: ServerProcess, name: str) -> int:
    return next(pid for pid in children(server.process.pid) if name in command(pid))


def generate(server: ServerProcess, answers: list[httpx.Response]) -> None:
    answers.append(httpx.post(f"{server.url}/generate", json=BODY, timeout=120))


def wait_for_another(server: ServerProcess, name: str, old: int) -> float:
    started = time.monotonic()
    while child_or_none(server, name) in (None, old):
        assert time.monotonic() - started < 60, server.log
        time.sleep(0.05)
    return time.monotonic() - started


def child_or_none(server: ServerProcess, name: str) -> int | None:
    with_it = [pid for pid in children(server.process.pid) if name in command(pid)]
    return with_it[0] if with_it else None


@pytest.mark.parametrize("stops", [False, True], ids=["sleeps", "is stopped"])
def test_the_log_says_where_the_worker_stands(stops: bool) -> None:
    args = ["--model-path", str(tiny_model("qwen3")), "--watchdog-timeout", str(WATCHDOG_S)]
    answers: list[httpx.Response] = []
    with ServerProcess(*args, "--skip-server-warmup") as server:
        server.wait_ready()
        whole = server.client.post("/generate", json=BODY).json()["text"]
        worker = child(server, "scheduler")
        if stops:
            os.kill(worker, signal.SIGSTOP)
        else:
            server.client.post("/slow_down", json={"forward_sleep_time": 60}).raise_for_status()
        thread = threading.Thread(target=generate, args=(server, answers))
        thread.start()
        took_s = wait_for_another(server, "scheduler", worker)
        thread.join(60)
        # It went on in the new worker.
        assert [answer.json()["text"] for answer in answers] == [whole]
        # The stacks cost two seconds at most; a busy machine gets more.
        assert took_s < WATCHDOG_S + 15
        server.wait_for_line("The worker is stuck")
        if stops:
            server.wait_for_line("It wrote no stacks within")
        else:
            # The call that it hangs in, with its file, and a thread that does not hang.
            server.wait_for_line("most recent call first")
            assert "in launch" in server.log
            assert "model_runner.py" in server.log
            assert "_leave_with_parent" in server.log
            begun = server.log.index("The worker is stuck")
            assert begun < server.log.index("was ended by SIGKILL")
        while server.client.get("/readyz").status_code != 200:
            time.sleep(0.05)
        assert server.client.post("/generate", json=BODY).json()["text"] == whole
