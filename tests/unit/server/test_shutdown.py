"""Signals end the process even if a thread or the event loop itself hangs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from server.shutdown import HURRIED_PATIENCE_S
from tests.support.guard import watch
from tests.support.server import ROOT, python_path

# A front without an engine: its signals, its loop, and what hangs there.
SCRIPT = """
import asyncio, sys, threading
from runtime.client.admission import EngineLimits
from runtime.client.client import EngineClient
from runtime.service.context import Lifecycle
from server.shutdown import Shutdown, leave

async def main(what):
    limits = EngineLimits(64, 64, 64, allow_auto_truncate=False)
    shutdown = Shutdown(Lifecycle(), EngineClient(limits, 0), 60.0)
    shutdown.install()
    hangs = threading.Event()
    if what == "thread":
        threading.Thread(target=hangs.wait).start()
    if what == "pool":
        asyncio.get_running_loop().run_in_executor(None, hangs.wait)
    print("ready", flush=True)
    if what == "loop":
        hangs.wait()
    if what == "cleanup":
        await shutdown.requested.wait()
        print("requested", flush=True)
        await asyncio.Event().wait()
    await shutdown.requested.wait()
    await shutdown.drain()
    if what == "pool":
        # As `asyncio.run` waits for the default pool.
        await asyncio.get_running_loop().shutdown_default_executor()

asyncio.run(main(sys.argv[1]))
print("left", flush=True)
leave(0)
"""


def start(what: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, what],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": python_path()},
    )
    watch(process.pid)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("what", ["nothing", "thread"])
def test_a_thread_that_hangs_does_not_keep_the_process(what: str) -> None:
    process = start(what)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "left\n")


@pytest.mark.slow
def test_a_second_signal_always_ends_the_process() -> None:
    # What hangs, and whether it is asked by SIGTERM or Ctrl-C; all wait at the same time.
    asked = {"loop": signal.SIGTERM, "cleanup": signal.SIGINT, "pool": signal.SIGTERM}
    processes = {what: start(what) for what in asked}
    for _ in range(2):
        for what, process in processes.items():
            process.send_signal(asked[what])
        # Two of a kind that wait to be handled are one.
        time.sleep(0.5)
    started = time.monotonic()
    for process in processes.values():
        _, err = process.communicate(timeout=HURRIED_PATIENCE_S + 30)
        assert process.returncode == 1
        # The log says what held it up.
        assert "Stacks of all threads" in err
        assert "most recent call first" in err
    assert time.monotonic() - started < HURRIED_PATIENCE_S + 15
