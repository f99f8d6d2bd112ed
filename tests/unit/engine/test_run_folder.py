"""Run folders of dead servers are removed; others stay, even while many servers start at once."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.ipc.transport import create_run_folder, remove_run_folder

ROOT = Path(__file__).resolve().parents[3]

# Makes a folder, shows it and holds it until its standard input ends.
OWNER = textwrap.dedent(
    """
    import sys
    from runtime.ipc.transport import create_run_folder
    print(create_run_folder(), flush=True)
    sys.stdin.read()
    """
)


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # Sockets in it have short paths; those of pytest's own folders are long.
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture
def dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


@pytest.fixture
def owner(base: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def stale(base: Path, pid: int, name: str = "x") -> Path:
    folder = base / f"headrace-{pid}-{name}"
    folder.mkdir(mode=0o700)
    (folder / "front").touch()
    return folder


def descriptors(base: Path) -> list[str]:
    """What this process has open of the folders in `base`."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(link))
    return [path for path in found if path.startswith(f"{base}/")]


def test_it_is_private_and_goes_when_it_is_removed(base: Path) -> None:
    folder = create_run_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(descriptors(base)) == 1
    remove_run_folder(folder)
    remove_run_folder(folder)
    assert not list(base.iterdir())
    assert not descriptors(base), "its lock is left"


def test_that_of_a_dead_server_is_removed(base: Path, dead_pid: int) -> None:
    old = stale(base, dead_pid)
    remove_run_folder(create_run_folder())
    assert not old.exists()
    assert not descriptors(base)


def test_what_others_own_stays(base: Path, dead_pid: int) -> None:
    target = base / "target"
    target.mkdir()
    link = base / f"headrace-{dead_pid}-link"
    link.symlink_to(target)
    file = base / f"headrace-{dead_pid}-file"
    file.touch()
    remove_run_folder(create_run_folder())
    assert target.exists()
    assert link.is_symlink()
    assert file.exists()


def test_that_of_a_server_whose_process_id_means_nothing_here_stays_while_it_lives(
    base: Path, dead_pid: int, owner: tuple[subprocess.Popen[str], Path]
) -> None:
    process, folder = owner
    # As from another container: no process of this id is to be seen.
    there = folder.rename(base / f"headrace-{dead_pid}-there")
    remove_run_folder(create_run_folder())
    assert there.exists()
    process.kill()
    process.wait()
    remove_run_folder(create_run_folder())
    assert not there.exists()


def test_many_that_start_at_once_do_not_stumble_over_what_is_stale(
    base: Path, dead_pid: int
) -> None:
    script = textwrap.dedent(
        """
        import sys
        from runtime.ipc.transport import create_run_folder
        sys.stdin.readline()
        for _ in range(50):
            create_run_folder()
        """
    )
    owners = [
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, cwd=ROOT)
        for _ in range(4)
    ]
    for number in range(300):
        stale(base, dead_pid, str(number))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda process: process.communicate(b"\n", timeout=60), owners))
    assert [process.returncode for process in owners] == [0] * 4
    assert not list(base.glob(f"headrace-{dead_pid}-*"))
