"""A bar on a terminal, lines in a file."""

import io
import logging
import re
import time
from pathlib import Path

import pytest

from runtime.ipc.shared_state import SharedState
from runtime.processes.status import EngineStatus, ReplicaStatus
from server.progress_log import ProgressLog


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Says how long was slept, however long it took."""

    def __init__(self) -> None:
        self._now = 100.0

    def monotonic(self) -> float:
        return self._now

    def wait(self, seconds: float) -> None:
        # For the bar, which has a clock of its own, and draws no sooner than after 0.1 s of it.
        time.sleep(1.5 * seconds)
        self._now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def load(log: ProgressLog, folder: Path, clock: Clock) -> None:
    shared = SharedState(folder / "state", create=True)
    # The second replica is slower: the first one's progress is not the engine's.
    fast, slow = ReplicaStatus(shared=shared), ReplicaStatus(rank=1, shared=shared)
    status = EngineStatus([fast, slow])
    fast.phase, fast.fraction = "warming_up", 1.0
    slow.phase = "importing"
    log(status)
    slow.phase = "loading_weights"
    for percent in range(0, 101, 20):
        slow.fraction = percent / 100
        log(status)
        clock.wait(0.1)
    slow.phase, slow.fraction = "allocating_cache", 0.0
    log(status)
    clock.wait(0.2)
    fast.phase = slow.phase = "ready"
    log(status)
    log(status)
    shared.close()


def test_a_terminal_gets_a_bar(
    caplog: pytest.LogCaptureFixture, clock: Clock, tmp_path: Path
) -> None:
    stream = Terminal()
    with caplog.at_level(logging.INFO, logger="server.progress_log"):
        load(ProgressLog(stream, clock=clock.monotonic), tmp_path, clock)
    assert "Loading weights:  80%|" in stream.getvalue()
    *phases, seconds = caplog.messages
    assert phases == ["Starting the worker", "Loading weights", "Allocating the KV pool"]
    found = re.fullmatch(
        r"Seconds of the start: starting the worker (\S+), loading weights (\S+), "
        r"allocating the KV pool (\S+)",
        seconds,
    )
    assert found
    imports, weights, pool = map(float, found.groups())
    assert (imports, weights, pool) == (0.0, 0.6, 0.2)


def test_a_file_gets_lines_only(
    caplog: pytest.LogCaptureFixture, clock: Clock, tmp_path: Path
) -> None:
    stream = io.StringIO()
    with caplog.at_level(logging.INFO, logger="server.progress_log"):
        load(ProgressLog(stream, 0.15, clock.monotonic), tmp_path, clock)
    assert stream.getvalue() == ""
    assert "Loading weights 40%" in caplog.messages
