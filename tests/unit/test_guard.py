"""A killed test run leaves no servers behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
# Of its three processes one is forgotten; the last one is a group's, as `make serve` is.
RUN = """
import subprocess, time
from tests.support.guard import unwatch, watch
waits = ["sleep", "600"]
ended, left = subprocess.Popen(waits), subprocess.Popen(waits)
group = subprocess.Popen(["sh", "-c", "sleep 600 & wait"], start_new_session=True)
watch(ended.pid), watch(left.pid), watch(-group.pid), unwatch(ended.pid)
print(ended.pid, left.pid, group.pid, flush=True)
time.sleep(600)
"""


def test_a_killed_run_leaves_only_what_nobody_watched() -> None:
    run = subprocess.Popen([sys.executable, "-c", RUN], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    ended, *watched = (psutil.Process(int(pid)) for pid in run.stdout.readline().split())
    until(watched[-1].children)
    watched += watched[-1].children()
    run.kill()
    run.wait()
    try:
        _, alive = psutil.wait_procs(watched, timeout=60)
        assert not alive
        assert len(watched) == 3
        assert ended.is_running()
    finally:
        ended.kill()
