"""A bar on a terminal, lines in a file."""

import io
import logging
import time

import pytest

from runtime.client.host import EngineStatus
from server.progress import ProgressLog


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def load(log: ProgressLog) -> None:
    log(EngineStatus(phase="importing"))
    for percent in range(0, 101, 20):
        log(EngineStatus(phase="loading_weights", fraction=percent / 100))
        time.sleep(0.1)
    log(EngineStatus(phase="allocating_cache"))


def test_a_terminal_gets_a_bar(caplog: pytest.LogCaptureFixture) -> None:
    stream = Terminal()
    with caplog.at_level(logging.INFO, logger="server.progress"):
        load(ProgressLog(stream))
    assert "Loading weights:  80%|" in stream.getvalue()
    assert caplog.messages == ["Starting the worker", "Loading weights", "Allocating the KV pool"]


def test_a_file_gets_lines_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.progress._EVERY_S", 0.15)
    stream = io.StringIO()
    with caplog.at_level(logging.INFO, logger="server.progress"):
        load(ProgressLog(stream))
    assert stream.getvalue() == ""
    assert "Loading weights 40%" in caplog.messages
