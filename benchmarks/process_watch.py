"""Runs a server under a supervisor, and samples the memory and descriptors of its processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

# In its first seconds a process fills its caches, and this growth is no leak.
_SETTLING_S = 90.0
_MIN_SAMPLES = 6
_RESTART_DELAY_S = 0.5
# Maps the last word of a process's command line to the kind of process.
_KINDS = {
    "scheduler": "worker",
    "detokenizer": "detokenizer",
    "grammar": "grammar compiler",
    "runtime.media.image_process": "image decoder",
}


class SupervisedServer:
    """A server that is started again whenever its front ends, as systemd would do.

    Attributes:
        num_starts: number of starts of the front.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        """Prepare to run `command`; the server's output is appended to `log`."""
        self._command = command
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self.num_starts = 0

    def start(self) -> None:
        """Start the server in the background, without waiting."""
        self._task = asyncio.create_task(self._keep_running())

    async def _keep_running(self) -> None:
        with self._log.open("ab") as log:
            while not self._is_stopping:
                self.num_starts += 1
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, stdout=log, stderr=log
                )
                await self._process.wait()
                if not self._is_stopping:
                    await asyncio.sleep(_RESTART_DELAY_S)

    async def stop(self) -> int:
        """Stop the server with SIGTERM, and return its exit code."""
        self._is_stopping = True
        assert self._task is not None
        if self._process is None:
            self._task.cancel()
            return 0
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        await self._task
        return self._process.returncode or 0

    def processes(self) -> dict[int, str]:
        """Return the kind of each living process by id: `front`, `worker`, `detokenizer`, ..."""
        if self._process is None or self._process.returncode is not None:
            return {}
        front = self._process.pid
        return {front: "front", **_descendants(front)}


def _descendants(pid: int) -> dict[int, str]:
    parents: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents[int(fields[1])].append(int(folder.name))
    found: dict[int, str] = {}
    for child in parents[pid]:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{child}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            name = words[-1].decode(errors="replace")
            # Forks for single jobs are grandchildren of the front; they are too short-lived to be
            # watched.
            found[child] = _KINDS.get(name, name.rpartition(".")[2])
    return found


@dataclass
class Life:
    """The samples of one process, from its start to its end.

    Attributes:
        times: seconds from the beginning of the run, one for each sample.
        pss_mb: proportional set size in MB, which is the process's own memory plus its part of
            shared memory.
        own_mb: memory in MB that belongs to no file; other processes of the machine do not change
            it.
        descriptors: number of open file descriptors.
    """

    kind: str
    times: list[float] = field(default_factory=list)
    pss_mb: list[float] = field(default_factory=list)
    own_mb: list[float] = field(default_factory=list)
    descriptors: list[float] = field(default_factory=list)


class Watch:
    """Samples of every process of a server.

    Attributes:
        lives: the samples by process id.
    """

    def __init__(self, server: SupervisedServer, begin: float) -> None:
        """Prepare to watch `server`; times count from `begin`, by `time.monotonic()`."""
        self._server = server
        self._begin = begin
        self.lives: dict[int, Life] = {}

    def sample(self) -> None:
        """Take one sample of each living process."""
        now = time.monotonic() - self._begin
        for pid, kind in self._server.processes().items():
            with contextlib.suppress(OSError, IndexError, ValueError):
                memory = Path(f"/proc/{pid}/smaps_rollup").read_text()
                descriptors = len(os.listdir(f"/proc/{pid}/fd"))
                life = self.lives.setdefault(pid, Life(kind))
                life.times.append(now)
                life.pss_mb.append(_megabytes(memory, "Pss"))
                life.own_mb.append(_megabytes(memory, "Pss_Anon"))
                life.descriptors.append(descriptors)


def _megabytes(memory: str, name: str) -> float:
    return int(memory.split(f"\n{name}:")[1].split()[0]) / 1024


def slope_per_hour(lives: Sequence[Life], column: str) -> float | None:
    """Return the growth of a column per hour, fitted by least squares over all lives.

    Each life has its own level in the fit. The first 90 s of each life do not count. The result is
    `None` if too few samples are left.
    """
    covariance = variance = 0.0
    for life in lives:
        pairs = [
            (when, value)
            for when, value in zip(life.times, getattr(life, column), strict=True)
            if when - life.times[0] >= _SETTLING_S
        ]
        if len(pairs) < _MIN_SAMPLES:
            continue
        mean_time = sum(when for when, _ in pairs) / len(pairs)
        mean_value = sum(value for _, value in pairs) / len(pairs)
        covariance += sum((when - mean_time) * (value - mean_value) for when, value in pairs)
        variance += sum((when - mean_time) ** 2 for when, _ in pairs)
    return 3600 * covariance / variance if variance else None
