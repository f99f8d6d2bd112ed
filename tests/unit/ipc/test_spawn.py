"""A process that is started ahead of its configuration."""

from __future__ import annotations

import os
import queue

import pytest

from runtime.config.options import DetokenizerConfig
from runtime.ipc.process import Child
from runtime.ipc.spawn import end_ahead, spawn_ahead, take_ahead
from runtime.ipc.transport import create_run_folder, remove_run_folder
from tests.support.processes import alive
from tests.support.waiting import until

NAME = "detokenizer"


def test_a_child_is_the_process_that_was_started_ahead() -> None:
    ended: queue.Queue[int] = queue.Queue()
    folder = create_run_folder()
    # The process cannot read this tokenizer, so it ends when it has its configuration.
    config = DetokenizerConfig(
        run_folder=str(folder),
        generation=0,
        scheduler_generation=0,
        tokenizer_folder="/no/folder",
        log_level="info",
    )

    def on_exit(child: Child, code: int) -> None:
        ended.put(code)

    try:
        pid = spawn_ahead(NAME)
        first, second = (Child(NAME, config, on_exit, {"HEADRACE_X": "1"}) for _ in range(2))
        assert first.pid == pid
        assert second.pid != pid
        assert [ended.get(timeout=60), ended.get(timeout=60)] == [1, 1]
    finally:
        end_ahead()
        remove_run_folder(folder)


def test_a_process_that_was_started_ahead_ends_with_its_parent() -> None:
    spawn_ahead(NAME)
    spawned = take_ahead(NAME)
    assert spawned is not None
    with spawned.process as process, spawned.stacks:
        assert take_ahead(NAME) is None
        # With its stdin, the process loses its parent, whatever it does at this time.
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.mark.parametrize("has_died", [False, True])
def test_a_process_that_is_not_taken_ends(has_died: bool) -> None:
    pid = spawn_ahead(NAME)
    if has_died:
        os.kill(pid, 9)
        until(lambda: not alive(pid))
        assert take_ahead(NAME) is None
    end_ahead()
    assert not alive(pid)
