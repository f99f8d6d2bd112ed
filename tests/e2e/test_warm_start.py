"""Servers that are started as forks are what commands would have started."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.support.processes import OF_TESTS, command, engine_processes
from tests.support.server import ServerProcess, common_server
from tests.support.warm_start import Starter

START = {"PATH": "/bin", "PYTHONPATH": "/code", "OMP_WAIT_POLICY": "passive"}
# Those that the origin of the forks sets for its libraries.
EARLY = {"GOMP_SPINCOUNT": "1000", "OPENBLAS_NUM_THREADS": "1"}


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])


def files(pid: int) -> dict[int, str]:
    found = {}
    for number in os.listdir(f"/proc/{pid}/fd"):
        found[int(number)] = os.readlink(f"/proc/{pid}/fd/{number}")
    return found


def test_the_family_is_that_of_commands() -> None:
    front = common_server().process.pid
    assert parent(front) == os.getpid()
    assert command(front)[:3] == [sys.executable, "-m", "server.launch"]
    assert os.getpgid(front) == os.getpgid(0)
    for name, pid in engine_processes(front).items():
        assert parent(pid) == front
        assert command(pid)[:5] == [sys.executable, "-P", "-m", "runtime.ipc.process", name]
        assert os.getsid(pid) == pid


def test_a_fork_has_the_descriptors_of_its_command_only() -> None:
    front = common_server().process.pid
    log = files(front)[1]
    assert log.startswith("pipe:")
    for name, pid in engine_processes(front).items():
        opened = files(pid)
        assert {opened[1], opened[2]} == {log}, name
        assert log not in {opened[number] for number in opened if number > 2}, name
        assert max(opened) < 500, name


def test_a_fork_that_is_killed_is_reported() -> None:
    with ServerProcess() as server:
        server.wait_for_line("Starting the worker")
        assert OF_TESTS not in {word for pid in server.child_pids() for word in command(pid)}
        server.signal(signal.SIGKILL)
        assert server.wait_exit() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("changes", "can"),
    [
        ({}, True),
        ({"OMP_NUM_THREADS": "3", "PYTHONPATH": "/code:/code"}, True),
        ({"OMP_WAIT_POLICY": "active"}, False),
        ({"HF_HUB_OFFLINE": "1"}, False),
        ({"PYTHONPATH": "/other:/code"}, False),
    ],
    ids=str,
)
def test_environments_that_a_fork_would_not_see_get_a_command(
    changes: dict[str, str], can: bool
) -> None:
    with socket.socket() as control:
        starter = Starter(control, {**START, **EARLY})
        assert starter.can_start_in({**START, **changes}) == can
        assert not starter.can_start_in({})
