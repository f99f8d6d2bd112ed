"""The folders for temporary files and shared memory are full: a running server continues.

The folders are file systems that the test mounts in its own namespace, if the system allows that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.neighbours import Neighbours, greedy
from tests.support.processes import engine_processes
from tests.support.server import ROOT, ServerProcess, python_path
from tests.support.tiny_models import tiny_model
from tests.support.waiting import until

MOUNT = """
mount -t tmpfs -o size="$1" none "$TMPDIR" && mount -t tmpfs -o size=4k none /dev/shm || exit
shift
[ -z "$FULL" ] || head -c 1M /dev/zero > "$TMPDIR/filler" 2> /dev/null
head -c 1M /dev/zero > /dev/shm/filler 2> /dev/null
exec "$@"
"""


def inside(size: str) -> tuple[str, ...]:
    """A command that runs another one whose TMPDIR has `size`, and whose shared memory is full."""
    return ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", MOUNT, "sh", size)


def may_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TMPDIR": folder}
        with contextlib.suppress(FileNotFoundError):
            return subprocess.run([*inside("4k"), "true"], env=environment).returncode == 0
    return False


pytestmark = pytest.mark.skipif(not may_mount(), reason="no file system can be mounted here")

WRITE = """
import sys
from pathlib import Path
from runtime.ipc.shared_state import SharedState
try:
    SharedState(Path(sys.argv[1]) / "state", create=True)["has_work"] = 1.0
except OSError as error:
    sys.exit(error.errno)
"""


def test_no_room_for_the_shared_numbers_is_an_error_of_the_system() -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": python_path(), "TMPDIR": folder, "FULL": "1"}
        command = [*inside("16k"), sys.executable, "-c", WRITE, folder]
        # Not a signal, which says nothing.
        code = subprocess.run(command, env=environment, cwd=ROOT).returncode
    assert code == errno.ENOSPC


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    with pytest.raises(OSError, match="No space"):
        (folder / "more").write_bytes(b"x" * 65_536)


def test_a_server_goes_on_and_replaces_its_worker() -> None:
    with tempfile.TemporaryDirectory() as folder:
        args = ("--model-path", str(tiny_model("qwen3")))
        with ServerProcess(*args, prefix=inside("1m"), TMPDIR=folder, FULL="") as server:
            server.wait_ready()
            solo = greedy(server)
            # The folder as the server sees it.
            fill(Path(f"/proc/{server.process.pid}/root{folder}"))
            with Neighbours(server) as neighbours:
                assert greedy(server) == solo
            assert set(neighbours.texts) == {solo}
            worker = engine_processes(server.process.pid)["scheduler"]
            os.kill(worker, signal.SIGKILL)
            until(lambda: engine_processes(server.process.pid).get("scheduler", worker) != worker)
            until(lambda: server.client.get("/readyz").status_code == 200, 90, server)
            assert greedy(server) == solo
